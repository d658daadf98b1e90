// The latest requests: who served each, and why.

import { byId, h, put, say } from "./dom.js";
import * as format from "./format.js";

const ROWS = 50;

export class Feed {
  constructor() {
    this.body = byId("requests");
    this.seen = 0; // the number of the latest request that is known
    this.held = []; // came while it was paused, the newest first
    this.paused = false;
    const button = byId("pause");
    button.addEventListener("click", () => {
      this.paused = !this.paused;
      put(button, "aria-pressed", this.paused);
      this.flush();
    });
  }

  /** The gateway's numbers begin anew with its process. */
  show({ instance, requests, seq }) {
    if (instance !== this.instance || seq < this.seen) {
      this.seen = 0;
      this.instance = instance;
    }
    const fresh = requests.filter((request) => request.seq > this.seen);
    this.seen = Math.max(this.seen, seq);
    this.held = [...fresh, ...this.held].slice(0, ROWS);
    this.flush();
  }

  flush() {
    say(byId("feed-note"), this.paused ? `Paused · ${this.held.length} new` : "The latest ones, newest first");
    if (this.paused) return;
    const first = this.body.childElementCount === 0;
    this.body.prepend(...this.held.map((request) => row(request, !first)));
    this.held = [];
    while (this.body.childElementCount > ROWS) this.body.lastElementChild.remove();
    byId("no-requests").hidden = this.body.childElementCount > 0;
  }
}

function row(request, isNew) {
  const cells = [
    cell("Time", h("time", { datetime: new Date(request.at).toISOString() }, format.clock(request.at))),
    cell("Model", h("span", { class: "model" }, request.asked ?? format.NONE)),
    cell("Served by", ...servedBy(request)),
    cell("Why", h("span", { class: "why" }, why(request))),
    cell("Tokens", tokens(request)),
    cell("First token", format.duration(request.stream ? request.first_content_ms : null)),
    cell("Total", format.duration(request.ms)),
    cell("Cost", request.cost_usd ? format.dollars(request.cost_usd) : request.outcome === "ok" ? "free" : format.NONE),
  ];
  for (const each of cells.slice(4)) each.classList.add("number");
  return h("tr", { role: "row", "data-outcome": request.outcome, "data-new": isNew ? "" : null, "data-id": request.id }, ...cells);
}

const cell = (label, ...content) => h("td", { role: "cell", "data-label": label }, ...content);

function servedBy({ node, tier, outcome }) {
  const mark = { failed: "failed", refused: "refused", abandoned: "client left" }[outcome];
  return [
    node && outcome === "ok" ? h("span", { class: "who" }, node) : null,
    node && outcome === "ok" ? h("span", { class: "tag", "data-tier": tier }, tier) : null,
    mark ? h("span", { class: "tag", "data-outcome": outcome }, mark) : null,
  ];
}

/** Why this node, or why none, in one line. */
export function why(request) {
  const failed = request.attempts.filter((attempt) => attempt.failure);
  const tried = failed.map((attempt) => `${attempt.node}: ${format.words(attempt.failure)}`).join(", ");
  if (request.outcome === "ok") {
    if (request.tier === "cloud") return tried ? `${tried}; so the cloud` : `the cloud, as ${cloud(request)}`;
    return tried ? `${tried}; so ${request.node}` : local(request);
  }
  if (request.outcome === "abandoned") return request.node ? `it was on ${request.node}` : "before it was served";
  const status = request.status && request.status !== 200 ? `${request.status} ` : "";
  return `${status}${format.words(request.code ?? "")}${tried ? ` · ${tried}` : ""}` || format.NONE;
}

const REASONS = { no_local_node: "no local node could", overloaded: "all local nodes were full" };
const cloud = ({ fallback, cloud: told }) => REASONS[fallback] ?? told.why;

function local({ why: told, queued_ms: queued }) {
  const waited = queued >= 100 ? `, after ${format.duration(queued)} in the queue` : "";
  const [, policy, number] = /^(.+) over (\d+)$/.exec(told ?? "") ?? [];
  return (policy ? `${format.words(policy)} among ${number} nodes` : (told ?? "")) + waited;
}

function tokens({ tokens_in: read, tokens_out: written }) {
  return read === null && written === null ? format.NONE : `${format.count(read)} → ${format.count(written)}`;
}
