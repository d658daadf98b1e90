// Figures as people read them.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const GIB = 2 ** 30; // as nodes and their drivers count memory
export const NONE = "–";

export const count = (value) => (value === null || value === undefined ? NONE : WHOLE.format(value));

/** A rate: two or three figures that matter. */
export function rate(value) {
  if (value >= 100) return WHOLE.format(value);
  return String(Number(value.toFixed(value >= 10 ? 1 : 2)));
}

export function duration(ms) {
  if (ms === null || ms === undefined) return NONE;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  return `${Math.floor(ms / 60_000)} min ${Math.round((ms % 60_000) / 1000)} s`;
}

export function dollars(value) {
  if (value === null || value === undefined) return NONE;
  if (value > 0 && value < 0.01) return `$${value.toFixed(value < 0.0001 ? 6 : 4)}`;
  return value.toLocaleString("en", { style: "currency", currency: "USD" });
}

/** A share of 1. Only all is 100 %, and only nothing is 0 %. */
export function percent(share) {
  if (share === null || share === undefined) return NONE;
  const rounded = Math.round(share * 100);
  if (rounded === 100 && share < 1) return "99.9\u00a0%";
  if (rounded === 0 && share > 0) return "0.1\u00a0%";
  return `${rounded}\u00a0%`;
}

export const gibibytes = (bytes) => {
  const value = bytes / GIB;
  return value >= 10 || value === 0 ? value.toFixed(0) : value.toFixed(1);
};

export const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");

export function uptime(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.floor(seconds)} s`;
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

export const words = (name) => (name ?? "").replaceAll("_", " ");

export const plural = (number, one) => `${count(number)} ${one}${number === 1 ? "" : "s"}`;

const PERIODS = { day: "today", week: "this week", month: "this month" };
export const period = (name) => PERIODS[name] ?? name;
