# Hearth's image. Build: docker build -t hearth .    Run: docker run --env-file .env -p 8000:8000 hearth
FROM python:3.13-slim AS builder
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
COPY requirements.txt ./
RUN python -m venv /opt/hearth && \
    /opt/hearth/bin/python -m pip install --require-hashes -r requirements.txt

FROM python:3.13-slim
# The id is fixed, so that a volume's owner and a cluster's runAsUser can name it.
RUN groupadd --gid 10001 hearth && \
    useradd --uid 10001 --gid hearth --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin hearth
COPY --from=builder /opt/hearth /opt/hearth
WORKDIR /app
COPY LICENSE ./
COPY deploy/healthcheck.py deploy/
COPY app/ app/
ENV PATH=/opt/hearth/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOST=0.0.0.0 \
    PORT=8000
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=15s --retries=3 CMD ["python", "deploy/healthcheck.py"]
# The exec form makes Python process 1, so that it is the one that `docker stop` sends SIGTERM to.
CMD ["python", "-m", "app", "serve"]
