// The page as a whole: which view is shown, whether the server answers, and what it says every other second.

import { Refused, Unreachable, ask, forgetKey, hasKey, keepKey } from "./api.js";
import { showAgents } from "./agents.js";
import { chatIn, drawWith, startChat, showNames } from "./chat.js";
import { startDeeds } from "./deeds.js";
import { byId, say } from "./dom.js";
import { showFigures } from "./figures.js";
import { showMisses } from "./misses.js";
import { showSharing } from "./sharing.js";
import { showTimes } from "./times.js";

const EVERY_MS = 2000;
const AGAIN_MS = [500, 1000, 2000, 4000];

/** Views of extensions by name: each shows what it lists, opens one of it by its id, and leaves that. */
const views = new Map();
for (const name of document.body.dataset.views.split(" ").filter(Boolean)) {
  views.set(name, await import(`./${name}.js`));
}

let timer = null;
let failures = 0;
let asking = false;
let wanted = false; // somebody asked for news while they were on their way

/** Ask the server for news now, rather than in a moment. */
function refresh() {
  clearTimeout(timer);
  if (asking) wanted = true;
  else poll();
}

async function poll() {
  asking = true;
  wanted = false;
  try {
    const began = performance.now();
    await look();
    failures = 0;
    // Of a busy server's time the page takes a tenth at most.
    again(wanted ? 0 : Math.max(EVERY_MS, 9 * (performance.now() - began)));
  } catch (error) {
    if (error instanceof Refused && error.status === 401) {
      wantKey();
    } else if (error instanceof Refused && error.status !== 503) {
      connection("degraded", "The server refused", error.message);
      again(EVERY_MS);
    } else if (error instanceof Refused || error instanceof Unreachable) {
      lost();
    } else {
      throw error;
    }
  } finally {
    asking = false;
  }
}

/** Ask again after a while; nobody asks for a page that is not looked at. */
function again(wait) {
  if (!document.hidden) timer = setTimeout(poll, wait);
}

/** What health says, also where it says that nothing can be computed now. */
async function ready() {
  try {
    return await ask("GET", "/health/ready");
  } catch (error) {
    if (error.answer?.status && error.answer.problems) return error.answer;
    throw error;
  }
}

async function look() {
  const [overview, health] = await Promise.all([ask("GET", "/overview"), ready()]);
  chatIn(overview.namespace);
  byId("key-change").hidden = !hasKey();
  const busy = health.running + health.waiting;
  const work = busy ? [health.running && `${health.running} running`, health.waiting && `${health.waiting} waiting`] : [["ok", "degraded"].includes(health.status) ? "ready" : health.status];
  const state = `${overview.model} · ${work.filter(Boolean).join(", ")}`;
  const problems = health.problems.join(" ");
  connection(problems ? "degraded" : "up", state, problems);
  byId("key-view").hidden = true;
  const { view, id } = route();
  for (const name of names()) byId(`${name}-view`).hidden = view !== name;
  showNames(overview.agents);
  drawWith(overview.sampling);
  if (view === "agents") {
    showFigures(overview, health);
    showAgents(overview);
    showSharing(overview);
    showTimes(overview);
    showMisses(overview);
  } else {
    await views.get(view).show(id);
  }
}

function lost() {
  const wait = AGAIN_MS[Math.min(failures, AGAIN_MS.length - 1)];
  failures += 1;
  connection("down", "Not reachable", "The server does not answer. What is shown may be old; this page tries again by itself.");
  again(wait);
}

function connection(state, words, notice) {
  document.body.dataset.connection = state;
  say(byId("status"), words);
  say(byId("notice"), notice);
  byId("notice").hidden = !notice;
}

function wantKey() {
  connection("key", "Needs a key", "");
  for (const name of names()) byId(`${name}-view`).hidden = true;
  byId("key-view").hidden = false;
  byId("key-change").hidden = true;
  if (hasKey()) {
    say(byId("key-said"), "The server does not know this key.");
    byId("key").select();
  }
  byId("key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  const foreign = key.match(/[^\x20-\xff]/u); // a header has no such character
  if (foreign) {
    say(byId("key-said"), `A key has no ${foreign[0]}: was all of it copied, and nothing else?`);
    return;
  }
  keepKey(key);
  refresh();
});

byId("key-change").addEventListener("click", () => {
  forgetKey();
  byId("key").value = "";
  say(byId("key-said"), "The other key is forgotten.");
  refresh();
});

function names() {
  return ["agents", ...views.keys()];
}

/** What the address says: #agents, or #VIEW or #VIEW/ID of an extension. */
function route() {
  const [view, id] = location.hash.slice(1).split("/");
  return views.has(view) ? { view, id: decoded(id ?? "") || null } : { view: "agents", id: null };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // somebody wrote it by hand
  }
}

function follow() {
  const { view, id } = route();
  for (const name of names()) {
    if (name === view) byId(`to-${name}`).setAttribute("aria-current", "page");
    else byId(`to-${name}`).removeAttribute("aria-current");
  }
  for (const [name, shown] of views) {
    if (name === view && id !== null) shown.open(id, refresh);
    else shown.leave();
  }
  refresh();
}

byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
addEventListener("hashchange", follow);
document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else refresh();
});
startChat(refresh);
startDeeds(refresh);
follow();
