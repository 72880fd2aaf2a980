// What a person does with an agent: keep it, move it, branch it, take turns back, carry it away, forget it.
//
// Whatever cannot be taken back is asked about first, in the page's one dialog.

import { Refused, Unreachable, ask, download, upload } from "./api.js";
import { byId, el, say } from "./dom.js";
import { count, counted, listed } from "./words.js";

let refresh = () => {};
const isStep = (id) => id === "." || id === ".."; // of a path, in which the browser would put another agent's name
const STEP = "A browser cannot send this id; `rekindle agents` can.";

function path(id, deed) {
  if (isStep(id)) throw new Refused(400, STEP);
  return `/v1/agents/${encodeURIComponent(id)}${deed}`;
}

/** Listen to the dialog and the button that imports; `news` asks for fresh figures. */
export function startDeeds(news) {
  refresh = news;
  byId("question-no").addEventListener("click", () => byId("question").close());
  byId("agent-import").addEventListener("click", importOne);
}

/** The buttons for one agent; `show(agent)` brings them up to how it is now. */
export function deedsFor(id) {
  const button = (words, act, kind = "") => el("button", { type: "button", class: kind, disabled: isStep(id), title: isStep(id) ? STEP : null, "aria-label": `${words} ${id}`, on: { click: act } }, words);
  const pin = button("Pin", () => act(id, pinned ? "unpinned" : "pinned: it stays on disk whatever else needs room", () => ask(pinned ? "DELETE" : "POST", path(id, "/pin"))));
  let pinned = false;
  const node = el(
    "div",
    { class: "deeds", role: "group", "aria-label": `What to do with ${id}` },
    pin,
    button("Offload", () => act(id, (done) => `out of memory: ${counted(done.evicted_blocks, "block")}, on disk until its next turn`, () => ask("POST", path(id, "/offload"), { patience: 0 }))),
    button("Fork", () => fork(id)),
    button("Rewind", () => rewind(id)),
    button("Export", () => act(id, "exported", () => download(path(id, "/export"), `${id.replaceAll(/[^\w.-]+/g, "_")}.agent`))),
    button("Purge", () => purge(id), "danger"),
  );
  node.show = (agent) => {
    pinned = agent.pinned;
    say(pin, pinned ? "Unpin" : "Pin");
    pin.setAttribute("aria-label", `${pinned ? "Unpin" : "Pin"} ${id}`);
  };
  return node;
}

/** Do it, say what came of it, and look again. */
async function act(id, done, deed) {
  said(`${id} …`);
  try {
    const answer = await deed();
    said(`${id}: ${typeof done === "function" ? done(answer) : done}.`);
  } catch (error) {
    if (!(error instanceof Refused || error instanceof Unreachable)) throw error;
    said(`${id}: ${error.message}`, true);
  }
  refresh();
}

function said(words, isError = false) {
  const node = byId("agents-said");
  say(node, words);
  node.hidden = !words;
  node.className = isError ? "error" : "quiet";
}

/** Ask a question in the dialog; what is typed, picked or true, null where the person says no. */
function question(words, yes, { field = null, isDanger = false } = {}) {
  const [dialog, form, button] = [byId("question"), byId("question-form"), byId("question-yes")];
  say(byId("question-words"), words);
  say(button, yes);
  button.className = isDanger ? "danger" : "primary";
  byId("question-field").replaceChildren(...(field ? [field] : []));
  return new Promise((resolve) => {
    let answer = null;
    form.onsubmit = (event) => {
      event.preventDefault();
      answer = true;
      dialog.close();
    };
    dialog.onclose = () => resolve(answer);
    dialog.showModal();
    (field?.querySelector("input") ?? byId("question-no")).focus();
  });
}

function labelled(words, input) {
  return el("label", {}, words, input);
}

async function fork(id) {
  const name = el("input", { required: true, dir: "auto", spellcheck: "false", autocomplete: "off", value: `${id}-2` });
  if (!(await question(`A second agent that remembers what ${id} remembers. What they have in common is kept once.`, "Fork", { field: labelled("Its name", name) }))) return;
  const target = name.value.trim();
  await act(id, `forked as ${target}`, () => ask("POST", path(id, "/fork"), { body: { target } }));
}

async function rewind(id) {
  const turns = el("input", { type: "number", min: 1, value: 1, required: true });
  if (!(await question(`Take back the last turns of ${id}. They are gone then; an agent without any is forgotten.`, "Rewind", { field: labelled("Turns", turns), isDanger: true }))) return;
  await act(id, (done) => `${counted(done.num_tokens, "token")} left`, () => ask("POST", path(id, "/rewind"), { body: { turns: turns.valueAsNumber } }));
}

async function purge(id) {
  const words = `Forget ${id} for good? Its bytes on disk and in memory are overwritten and read back. This cannot be undone: export it first to keep a copy.`;
  if (!(await question(words, "Purge", { isDanger: true }))) return;
  await act(id, purged, () => ask("POST", path(id, "/purge"), { patience: 0 }));
}

function purged(report) {
  const parts = [`purged: ${count(report.bytes_zeroed)} bytes on disk and ${counted(report.hot_blocks_zeroed, "block")} in memory overwritten`];
  if (report.blocks_shared) parts.push(`${counted(report.blocks_shared, "block")} on disk stay, as others share them`);
  if (report.sessions.length) parts.push(`still in ${listed(report.sessions)}`);
  return parts.join("; ");
}

async function importOne() {
  const file = el("input", { type: "file", required: true });
  const name = el("input", { required: true, dir: "auto", spellcheck: "false", autocomplete: "off" });
  file.addEventListener("change", () => (name.value ||= (file.files[0]?.name ?? "").replace(/\.agent$/, "")));
  const field = el("div", {}, labelled("File", file), labelled("Its name here", name));
  const words = "Import only files of people you trust: what an agent remembers is believed. One that was encrypted is imported with `rekindle agents import`.";
  if (!(await question(words, "Import", { field }))) return;
  const id = name.value.trim();
  await act(id, imported, () => upload(path(id, "/import"), file.files[0]));
}

function imported(entry) {
  const cold = entry.without_kv ? ` (${entry.without_kv})` : "";
  return `imported: ${counted(entry.num_tokens, "token")}, ${count(entry.kv_tokens)} of them computed${cold}`;
}
