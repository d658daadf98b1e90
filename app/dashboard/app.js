// Puts the page together: who may look, the stream, and the parts that show it.

import { Bars, Lines } from "./charts.js";
import { byId, put, say } from "./dom.js";
import { Feed } from "./feed.js";
import * as format from "./format.js";
import { Nodes } from "./nodes.js";
import { Stream } from "./stream.js";
import { Tiles } from "./tiles.js";

const SESSION = "dashboard/session";

class Page {
  constructor() {
    this.tiles = new Tiles(byId("tiles"));
    this.nodes = new Nodes((name, draining) => this.mark(name, draining), announce);
    this.feed = new Feed();
    this.first = new Lines(
      "Time to first token",
      [
        { key: "first_content_p50", name: "median", tone: "strong" },
        { key: "first_content_p95", name: "p95", tone: "soft" },
      ],
      format.duration,
    );
    this.tokens = new Bars(
      "Tokens per second",
      [
        { key: "tokens_local", name: "local", tone: "local" },
        { key: "tokens_cloud", name: "cloud", tone: "cloud" },
      ],
      format.rate,
    );
    byId("charts").replaceChildren(this.first.element, this.tokens.element);
    say(byId("base-url"), new URL("v1", document.baseURI).href);
    this.stream = new Stream("admin/events", {
      onSnapshot: (snapshot) => this.show(snapshot),
      onLost: () => this.lost(),
      mayOpen: async () => (await session()).may,
      onRefused: () => this.start(),
    });
    byId("login").addEventListener("submit", (event) => this.logIn(event));
    byId("logout").addEventListener("click", () => this.logOut());
  }

  async start() {
    let told;
    try {
      told = await session();
    } catch {
      this.stream.lost();
      return;
    }
    byId("logout").hidden = !told.session;
    if (told.may) this.stream.open();
    else this.close(told);
  }

  /** Shows why nothing is to be seen, and asks for a key where one would help. */
  close({ login, reason }) {
    byId("board").hidden = true;
    byId("gate").hidden = false;
    byId("login").hidden = !login;
    byId("refused").hidden = login;
    say(byId("refused"), reason);
    this.warn("");
    light(login ? "Not logged in" : "Not open to you", "idle");
    if (login) byId("key").focus();
  }

  show(snapshot) {
    byId("gate").hidden = true;
    byId("board").hidden = false;
    put(byId("board"), "data-stale", null);
    if (this.isLost) this.warn("");
    light("Live", "good");
    this.at = snapshot.at;
    const replicas = snapshot.replicas.length > 1 ? ` · 1 of ${snapshot.replicas.length} replicas` : "";
    say(byId("about"), `${snapshot.version} · up ${format.uptime(snapshot.uptime_seconds)}${replicas}`);
    put(byId("about"), "title", snapshot.instance);
    this.tiles.show(snapshot);
    this.nodes.show(snapshot.nodes);
    this.first.show(snapshot.series);
    this.tokens.show(snapshot.series);
    this.feed.show(snapshot);
  }

  lost() {
    light("Connection lost", "bad");
    put(byId("board"), "data-stale", "");
    const seen = this.at ? ` What you see is from ${format.clock(this.at)}.` : "";
    this.warn(`The connection to Hearth is lost.${seen} Trying again…`);
    this.isLost = true;
  }

  /** Stays until another one, or until what it tells of is over. */
  warn(text) {
    this.isLost = false;
    say(byId("banner"), text);
    byId("banner").hidden = !text;
  }

  async mark(name, draining) {
    const path = `admin/nodes/${encodeURIComponent(name)}/${draining ? "drain" : "enable"}`;
    if (!this.isLost) this.warn("");
    try {
      const answer = await fetch(path, { method: "POST" });
      if (!answer.ok) throw new Error((await answer.json()).error.message);
    } catch (error) {
      this.warn(`${name} could not be ${draining ? "drained" : "enabled"}: ${error.message}`);
    }
  }

  async logIn(event) {
    event.preventDefault();
    const field = byId("key");
    say(byId("login-error"), "");
    try {
      const headers = { "content-type": "application/json" };
      const answer = await fetch(SESSION, { method: "POST", headers, body: JSON.stringify({ key: field.value }) });
      if (!answer.ok) throw new Error(answer.status === 401 ? "This is none of the admin keys." : `Hearth said ${answer.status}.`);
      field.value = "";
      await this.start();
    } catch (error) {
      say(byId("login-error"), error.message);
      field.select();
    }
  }

  async logOut() {
    this.stream.close();
    await fetch(SESSION, { method: "DELETE" }).catch(() => null);
    await this.start();
  }
}

async function session() {
  const answer = await fetch(SESSION);
  if (!answer.ok) throw new Error(`Hearth said ${answer.status}`);
  return answer.json();
}

function light(text, tone) {
  say(byId("link"), text);
  put(byId("link"), "data-tone", tone);
}

function announce(text) {
  say(byId("announcer"), text);
}

new Page().start();
