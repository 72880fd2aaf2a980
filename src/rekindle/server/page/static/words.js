// Numbers, times and outcomes as people read them.

const whole = new Intl.NumberFormat("en-US");

export const OUTCOMES = ["exact", "extend", "diverge", "miss"];
export const MEANS = {
  exact: "the prompt is stored",
  extend: "it goes on from what is stored",
  diverge: "it leaves what is stored, after a useful beginning",
  miss: "next to nothing of it is stored",
};

/** 1,204 */
export function count(number) {
  return number === null || number === undefined ? "–" : whole.format(number);
}

/** `1 token`, `3 tokens` */
export function counted(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : noun.endsWith("ch") ? "es" : "s"}`;
}

/** 8.4 ms, 120 ms, 2.1 s: never parted from its unit */
export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms >= 1000) return `${(ms / 1000).toFixed(ms < 10000 ? 1 : 0)}\u00a0s`;
  return `${ms.toFixed(ms < 10 ? 1 : 0)}\u00a0ms`;
}

/** 0.4 s, 52 s, 3 min, 1 h 12 min: of seconds */
export function span(seconds) {
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${count(Math.floor(minutes / 60))} h ${minutes % 60} min`;
}

/** 98.7 %, and 100 % of nothing */
export function share(part, all) {
  if (!all) return "–";
  const percent = (100 * part) / all;
  // Never round up to all, nor down to none.
  return `${percent > 99.9 && part < all ? "99.9" : percent.toFixed(percent === 100 || percent === 0 ? 0 : 1)} %`;
}

/** 512 B, 21.4 MiB */
export function bytes(number) {
  const at = number < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(number) / 10));
  return `${at ? (number / 1024 ** at).toFixed(1) : number} ${["B", "KiB", "MiB", "GiB", "TiB"][at]}`;
}

/** now, 12 s ago, 3 min ago: of a moment in Unix seconds */
export function ago(moment) {
  const passed = Date.now() / 1000 - moment;
  if (passed < 5) return "now";
  for (const [size, name] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (passed >= size) return `${Math.floor(passed / size)} ${name} ago`;
  }
  return `${Math.floor(passed)} s ago`;
}

/** 14:03:22 */
export function clock(moment) {
  return new Date(moment * 1000).toLocaleTimeString("en-GB");
}

/** An id where there is little room: the beginning, and what stands behind its last slash. */
export function short(id) {
  const characters = [...id];
  if (characters.length <= 20) return id;
  const part = (from, to) => characters.slice(from, to).join("");
  const slash = characters.lastIndexOf("/");
  const last = part(slash, slash + 14);
  return slash >= 0 && last.length > 1 ? `${part(0, 9)}…${last}` : `${part(0, 19)}…`;
}

/** ada, bo and cy */
export function listed(names) {
  if (names.length < 2) return names.join("");
  return `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
}

/** The middle of some numbers, of two the lower one, as the server's; null of none. */
export function median(numbers) {
  if (!numbers.length) return null;
  return [...numbers].sort((a, b) => a - b)[(numbers.length - 1) >> 1];
}
