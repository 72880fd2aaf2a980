// The page as a whole: which view is shown, whether the server answers, and what it says every other second.

import { Refused, Unreachable, ask, hasKey, keepKey } from "./api.js";
import { showAgents } from "./agents.js";
import { drawWith, startChat, showNames } from "./chat.js";
import { byId, say } from "./dom.js";
import { counted } from "./words.js";
import { showMisses } from "./misses.js";
import { leaveSession, noticed, openSession } from "./session.js";
import { showSessions } from "./sessions.js";
import { showSharing } from "./sharing.js";
import { showTimes } from "./times.js";

const EVERY_MS = 2000;
const AGAIN_MS = [500, 1000, 2000, 4000];

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

async function look() {
  const [overview, health] = await Promise.all([ask("GET", "/overview"), ask("GET", "/health/ready")]);
  const busy = health.running + health.waiting;
  const work = busy ? [health.running && `${health.running} running`, health.waiting && `${health.waiting} waiting`] : ["ready"];
  const state = `${overview.model} · ${work.filter(Boolean).join(", ")}`;
  const problems = health.problems.join(" ");
  connection(problems ? "degraded" : "up", state, problems);
  byId("key-view").hidden = true;
  const view = route().view;
  byId("agents-view").hidden = view !== "agents";
  byId("sessions-view").hidden = view !== "sessions";
  showNames(overview.agents);
  drawWith(overview.sampling);
  if (view === "agents") {
    showAgents(overview);
    showSharing(overview);
    showTimes(overview);
    showMisses(overview);
  } else {
    noticed(await showSessions(route().session));
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
  byId("agents-view").hidden = byId("sessions-view").hidden = true;
  byId("key-view").hidden = false;
  if (hasKey()) {
    say(byId("key-said"), "The server does not know this key.");
    byId("key").select();
  }
  byId("key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(byId("key").value.trim());
  refresh();
});

/** What the address says: #agents, #sessions or #sessions/ID. */
function route() {
  const [view, id] = location.hash.slice(1).split("/");
  return view === "sessions" ? { view, session: decoded(id ?? "") || null } : { view: "agents", session: null };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // somebody wrote it by hand
  }
}

function follow() {
  const { view, session } = route();
  for (const name of ["agents", "sessions"]) {
    if (name === view) byId(`to-${name}`).setAttribute("aria-current", "page");
    else byId(`to-${name}`).removeAttribute("aria-current");
  }
  if (session === null) leaveSession();
  else openSession(session, refresh);
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
follow();
