// The first row: what memory holds of its budgets, what reuse gave in the last hour and today, what waits.

import { byId, el, keyed } from "./dom.js";
import { OUTCOMES, bytes, clock, count, counted, duration, share, span } from "./words.js";

/** Draw the figures; those of the operator only where the server says them. */
export function showFigures(overview, health) {
  const rows = [...ofMemory(overview), reused(overview.hour), firstTokens(overview.hour), saved(overview.saved), ...ofDisk(overview), ...checks(overview), queue(overview, health)];
  keyed(byId("figures"), rows, { key: ({ name }) => name, make, update: (node, row) => node.show(row) });
}

function ofMemory({ memory }) {
  if (!memory) return [];
  const { hot_used, hot_bytes, disk_used, disk_bytes } = memory;
  return [
    hot_bytes ? filled("In memory", hot_used, hot_bytes, "hot") : null,
    disk_bytes ? filled("On disk", disk_used, disk_bytes, "warm") : null,
  ].filter(Boolean);
}

function filled(name, used, most, tier) {
  return { name, value: bytes(used), about: [`of ${bytes(most)}`], part: used / most, tier, title: "Bytes of blocks, those that several agents share counted once." };
}

function reused(hour) {
  const sum = (field) => Object.values(hour).reduce((all, each) => all + each[field], 0);
  const [prompt, requests] = [sum("prompt_tokens"), sum("requests")];
  const about = requests ? [`of ${counted(prompt, "prompt token")}, ${counted(requests, "request")}`] : ["no request"];
  return { name: "Reused, last hour", value: share(sum("reused_tokens"), prompt), about };
}

function firstTokens(hour) {
  const outcomes = OUTCOMES.filter((outcome) => hour[outcome]).map((outcome) => ({ outcome, ms: hour[outcome].first_token_ms, requests: hour[outcome].requests }));
  return { name: "First token, last hour", outcomes, value: "–", about: outcomes.length ? [] : ["no request"], title: "The median of each outcome." };
}

function saved({ since, reused_tokens: tokens, seconds }) {
  const about = seconds === null && tokens ? "no long prompt was computed to compare with" : `${counted(tokens, "token")} reused`;
  const title = `What computing the reused tokens would have taken since ${clock(since)}, at the pace of the long prompts that were computed since, less the time of loading.`;
  return { name: "Time saved today", value: seconds === null ? "–" : `about ${span(seconds)}`, about: [about], title };
}

function ofDisk({ written }) {
  if (!written) return [];
  const about = [written.a_day === null ? null : `of ${bytes(written.a_day)}`, written.a_turn === null ? null : `${bytes(written.a_turn)} a turn`];
  return [{ name: "Disk writes today", value: bytes(written.today), about: about.filter(Boolean), part: written.a_day === null ? null : written.today / written.a_day, tier: "saved" }];
}

function checks({ memory }) {
  if ((memory?.checked ?? null) === null) return [];
  const about = memory.differed ? `${count(memory.differed)} had other bits, and were dropped` : memory.checked ? "all with the same bits" : "none yet";
  const title = "Blocks from disk that were computed again in idle time, and compared bit by bit.";
  return [{ name: "Blocks checked", value: count(memory.checked), about: [about], title }];
}

function queue({ memory }, { running, waiting }) {
  const saves = memory?.waiting_saves;
  const about = [saves ? `${counted(saves, "save")} waiting for the disk` : null, waiting ? null : "nobody waits"];
  return { name: "Now", value: `${count(running)} running`, about: [waiting ? `${count(waiting)} waiting` : null, ...about].filter(Boolean) };
}

function make({ name }) {
  const value = el("p", { class: "value" });
  const bar = el("div", { class: "level", "aria-hidden": "true" }, el("span", {}));
  const about = el("p", { class: "quiet" });
  const node = el("div", { class: "figure", role: "group", "aria-label": name }, el("h3", {}, name), value, bar, about);
  node.show = (row) => {
    if (row.title) node.setAttribute("title", row.title);
    const several = row.outcomes?.length > 0;
    value.replaceChildren(...(several ? row.outcomes.map(ofOutcome) : [row.value]));
    value.classList.toggle("several", several);
    bar.hidden = row.part === undefined || row.part === null;
    if (!bar.hidden) {
      bar.className = `level ${row.tier}`;
      bar.style.setProperty("--part", `${Math.min(100, 100 * row.part)}%`);
    }
    about.replaceChildren(row.about.join(", "));
    about.hidden = !row.about.length;
  };
  return node;
}

function ofOutcome({ outcome, ms, requests }) {
  return el("span", {}, el("span", { class: `outcome ${outcome}` }, outcome), ` ${duration(ms)} `, el("span", { class: "quiet" }, `×${count(requests)}`));
}
