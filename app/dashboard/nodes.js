// The nodes, a card for each. Cards are kept and changed, so that focus and selection stay where they are.

import { bar, byId, h, put, say } from "./dom.js";
import * as format from "./format.js";

const TONES = {
  healthy: "good",
  loading: "warn",
  joining: "warn",
  sleeping: "warn",
  unknown: "idle",
  down: "bad",
};
const CHIPS = 6;

/** What a node is, in a word, a tone and a reason. */
export function condition(node) {
  const left = node.in_flight + node.others_in_flight;
  if (node.draining) {
    return { word: left ? "Draining" : "Drained", tone: "idle", reason: left ? `${left} still in flight` : node.reason };
  }
  if (node.state === "healthy" && node.breaker.state !== "closed") {
    const wait = Math.ceil(node.breaker.retry_seconds);
    const again = wait > 0 ? ` Tried again in ${wait} s.` : " Tried again with the next request.";
    return { word: "Left alone", tone: "bad", reason: `${sentence(node.breaker.reason ?? "It failed")}${again}` };
  }
  if (node.state === "healthy" && node.busy_seconds > 0) return { word: "Busy", tone: "warn", reason: "It said so itself." };
  return { word: capital(node.state), tone: TONES[node.state] ?? "idle", reason: node.reason };
}

const capital = (word) => word.charAt(0).toUpperCase() + word.slice(1);
const sentence = (text) => (/[.!?]$/.test(text) ? text : `${text}.`);

class Card {
  constructor(node, onMark) {
    this.name = node.name;
    this.title = h("h3", {}, node.name);
    this.kind = h("span", { class: "tag" });
    this.pill = h("span", { class: "pill" });
    this.url = h("span", { class: "url" });
    this.reason = h("p", { class: "reason" });
    this.load = gauge("In flight");
    this.vram = gauge("VRAM");
    this.chips = h("ul", { class: "chips", "aria-label": "Loaded models" });
    this.models = h("span", { class: "note" });
    this.word = h("span");
    this.button = h("button", { type: "button" }, this.word, h("span", { class: "visually-hidden" }, ` ${node.name}`));
    this.button.addEventListener("click", () => this.mark(onMark));
    this.element = h(
      "li",
      { class: "card", "data-node": node.name },
      h("div", { class: "card-head" }, this.title, this.pill),
      h("p", { class: "card-what" }, this.kind, " ", this.url),
      this.reason,
      this.load.element,
      this.vram.element,
      this.chips,
      h("div", { class: "card-foot" }, this.models, this.button),
    );
  }

  async mark(onMark) {
    if (this.marking) return;
    this.marking = true;
    put(this.button, "aria-busy", "true");
    try {
      await onMark(this.name, !this.draining);
    } finally {
      this.marking = false;
      put(this.button, "aria-busy", null);
    }
  }

  show(node, { word, tone, reason }) {
    this.draining = node.draining;
    put(this.element, "data-tone", tone);
    put(this.pill, "data-tone", tone);
    say(this.pill, word);
    say(this.kind, node.tier === "cloud" ? "cloud" : (node.kind ?? "kind not known yet"));
    put(this.kind, "data-tier", node.tier);
    say(this.url, node.url);
    say(this.reason, reason ?? "");
    this.reason.hidden = !reason;
    this.showLoad(node);
    this.showMemory(node);
    say(this.models, this.modelsNote(node));
    say(this.word, node.draining ? "Enable" : "Drain");
    this.button.hidden = node.tier === "cloud";
  }

  showLoad(node) {
    const all = node.in_flight + node.others_in_flight;
    const elsewhere = node.others_in_flight ? ` (${node.others_in_flight} by other replicas)` : "";
    const foreign = node.foreign ? `, and ${node.foreign} from elsewhere` : ""; // not through any Hearth
    const limit = node.max_concurrency ?? node.slots;
    const text = `${all}${limit ? ` of ${limit}` : ""}${elsewhere}${foreign}`;
    this.load.show(limit ? all / limit : 0, text, "local", Boolean(limit));
  }

  showMemory(node) {
    const up = node.state !== "down"; // what it held is gone with it
    const loaded = up ? (node.loaded ?? []) : [];
    const known = up && node.loaded !== null && (node.vram_gb !== null || node.vram_bytes > 0);
    this.vram.element.hidden = !known;
    if (known) {
      const share = node.vram_gb ? node.vram_bytes / (node.vram_gb * format.GIB) : 0;
      const size = node.vram_gb ? ` of ${node.vram_gb} GiB` : " GiB";
      this.vram.show(share, `${format.gibibytes(node.vram_bytes)}${size}`, share > 0.9 ? "warn" : "memory", node.vram_gb !== null);
    }
    const texts = loaded.slice(0, CHIPS).map(chip);
    if (loaded.length > CHIPS) texts.push(`and ${loaded.length - CHIPS} more`);
    if (texts.join() !== this.shownChips) {
      this.shownChips = texts.join();
      this.chips.replaceChildren(...texts.map((text) => h("li", {}, text)));
    }
    this.chips.hidden = texts.length === 0;
  }

  modelsNote(node) {
    if (node.models === null) return node.tier === "cloud" ? "asked last" : "models not known yet";
    const models = format.plural(node.models, "model");
    return node.state !== "down" && node.loaded?.length === 0 ? `${models}, none loaded` : models;
  }
}

function chip(model) {
  const size = model.vram_bytes ? ` ${format.gibibytes(model.vram_bytes)} GiB` : "";
  return `${model.name}${size}`;
}

function gauge(label) {
  const strip = bar();
  const text = h("span", { class: "gauge-text" });
  const element = h("p", { class: "gauge" }, h("span", { class: "gauge-label" }, label), strip.element, text);
  return {
    element,
    show(share, words, tone, withBar) {
      strip.show(share, tone);
      put(element, "data-plain", withBar ? null : "");
      say(text, words);
    },
  };
}

export class Nodes {
  /** `onMark(name, draining)` drains or enables; `announce` is for screen readers. */
  constructor(onMark, announce) {
    this.onMark = onMark;
    this.announce = announce;
    this.cards = new Map();
    this.words = null; // of each node, as last told
  }

  show(nodes) {
    const names = new Set(nodes.map((node) => node.name));
    for (const [name, card] of this.cards) {
      if (!names.has(name)) {
        card.element.remove();
        this.cards.delete(name);
      }
    }
    const conditions = new Map(nodes.map((node) => [node.name, condition(node)]));
    nodes.forEach((node, place) => this.card(node, place).show(node, conditions.get(node.name)));
    put(byId("nodes"), "data-few", nodes.length < 3 ? "" : null);
    this.tellChanges(conditions);
    const local = nodes.filter((node) => node.tier !== "cloud");
    const healthy = local.filter((node) => conditions.get(node.name).tone === "good" || node.busy_seconds > 0).length;
    say(byId("nodes-note"), local.length ? `${healthy} of ${local.length} local ones can serve` : "");
    byId("no-nodes").hidden = nodes.length > 0;
    const troubled = [...conditions.values()].filter(({ tone }) => tone === "bad").length;
    document.title = troubled ? `(${troubled} down) Hearth` : "Hearth";
  }

  card(node, place) {
    let card = this.cards.get(node.name);
    if (!card) {
      card = new Card(node, this.onMark);
      this.cards.set(node.name, card);
    }
    const list = byId("nodes");
    if (list.children[place] !== card.element) list.insertBefore(card.element, list.children[place] ?? null);
    return card;
  }

  tellChanges(now) {
    if (this.words) {
      const changes = [...now]
        .filter(([name, { word }]) => this.words.get(name) !== word)
        .map(([name, { word, reason }]) => `${name}: ${word}${reason ? `, ${reason}` : ""}.`);
      for (const name of this.words.keys()) if (!now.has(name)) changes.push(`${name} has left.`);
      if (changes.length) this.announce(changes.join(" "));
    }
    this.words = new Map([...now].map(([name, { word }]) => [name, word]));
  }
}
