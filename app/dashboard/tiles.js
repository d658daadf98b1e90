// The figures at the top.

import { bar, h, put, say } from "./dom.js";
import * as format from "./format.js";

class Tile {
  constructor(label, { withBar = false } = {}) {
    this.value = h("span", { class: "value" });
    this.unit = h("span", { class: "unit" });
    this.note = h("span", { class: "note" });
    this.bar = withBar ? bar() : null;
    const told = h("dd", {}, h("span", { class: "figure" }, this.value, " ", this.unit), this.bar?.element, this.note);
    this.element = h("div", { class: "tile" }, h("dt", {}, label), told);
  }

  show(value, unit, note) {
    say(this.value, value);
    say(this.unit, unit);
    say(this.note, note);
  }
}

export class Tiles {
  constructor(list) {
    this.local = new Tile("Served locally", { withBar: true });
    this.requests = new Tile("Requests");
    this.tokens = new Tile("Throughput");
    this.first = new Tile("First token");
    this.spend = new Tile("Cloud spend", { withBar: true });
    this.saved = new Tile("Saved");
    list.replaceChildren(
      ...[this.local, this.spend, this.saved, this.requests, this.tokens, this.first].map((tile) => tile.element),
    );
  }

  show({ minute, money, queue, in_flight }) {
    this.showLocal(minute, money);
    const waiting = queue ? ` · ${queue} waiting` : "";
    this.requests.show(format.rate(minute.requests_per_second), "/s", `${in_flight} in flight${waiting}`);
    const failed = minute.failed ? ` · ${format.count(minute.failed)} failed` : "";
    this.tokens.show(
      format.rate(minute.tokens_per_second),
      "tokens/s",
      `${format.plural(minute.requests, "request")} in the last minute${failed}`,
    );
    const { p50, p95 } = minute.first_content_ms;
    this.first.show(...split(format.duration(p50)), p50 === null ? "in the last minute" : `median · p95 ${format.duration(p95)}`);
    if (money?.period) this.showMoney(money);
    else this.hideMoney(money);
  }

  showLocal(minute, money) {
    const share = minute.local_share ?? money?.local_share ?? null;
    const when = minute.local_share === null && money?.period ? format.period(money.period) : "in the last minute";
    const longer =
      minute.local_share !== null && typeof money?.local_share === "number"
        ? ` · ${format.percent(money.local_share)} ${format.period(money.period)}`
        : "";
    this.local.show(...split(format.percent(share)), share === null ? "no request yet" : when + longer);
    this.local.bar.show(share ?? 0, "local");
    put(this.local.bar.element, "data-rest", share === null ? null : "cloud");
  }

  showMoney(money) {
    const { budget } = money;
    const when = format.period(money.period);
    const trouble = money.trouble ? " · the ledger cannot be asked now" : "";
    if (budget) {
      const used = budget.limit_usd ? (budget.spent_usd + budget.held_usd) / budget.limit_usd : 1;
      this.spend.show(
        format.dollars(budget.spent_usd),
        `of ${format.dollars(budget.limit_usd)}`,
        `${format.dollars(budget.left_usd)} left ${when}${trouble}`,
      );
      this.spend.bar.show(used, used >= 1 ? "bad" : used >= 0.8 ? "warn" : "cloud");
    } else {
      this.spend.show(format.dollars(money.spent_usd), "", `${when} · no budget is set${trouble}`);
    }
    this.spend.bar.element.hidden = !budget;
    this.saved.show(format.dollars(money.saved_usd), "", `by local answers, ${when}`);
  }

  hideMoney(money) {
    const why = money === null ? "no ledger is kept" : "asking the ledger…";
    this.spend.show(format.NONE, "", why);
    this.saved.show(format.NONE, "", why);
    this.spend.bar.element.hidden = true;
  }
}

/** "182 ms" as figure and unit. */
function split(text) {
  const place = text.search(/[ \u00a0]/);
  return place < 0 ? [text, ""] : [text.slice(0, place), text.slice(place + 1)];
}
