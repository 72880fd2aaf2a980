// Receipts of replies: what was read of stored blocks, what was computed, by which model, and whether it was checked.

import { Refused, Unreachable, ask } from "./api.js";
import { el } from "./dom.js";
import { count, counted, share } from "./words.js";

const MOST = 200; // lines of receipts that are kept: what is drawn anew need not be asked for again
const known = new Map(); // where -> lines
const open = new Set(); // where

/** What opens the receipt of a choice; null for a reply that has none. It stays open where that place is drawn anew. */
export function receiptOf(place, { receipt, choice = 0 }) {
  if (!receipt) return null;
  const where = `${place} ${receipt}/${choice}`;
  const lines = el("div", { class: "receipt" });
  const node = el("details", { open: open.has(where), on: { toggle } }, el("summary", {}, "Receipt"), lines);
  if (known.has(where)) show();
  return node;

  function show() {
    lines.replaceChildren(...known.get(where).map((line) => el("p", {}, line)));
  }

  async function toggle() {
    if (!node.open) {
      open.delete(where);
      return;
    }
    const isDrawnAnew = open.has(where) && known.has(where);
    if (isDrawnAnew) return;
    open.add(where);
    try {
      const found = await ask("GET", `/v1/receipts/${encodeURIComponent(receipt).replaceAll(".", "%2E")}`);
      keep(where, linesOf(found, found.choices.find((each) => each.index === choice)));
      show();
    } catch (error) {
      if (!(error instanceof Refused || error instanceof Unreachable)) throw error;
      lines.replaceChildren(el("p", { class: "error" }, error.message));
    }
  }
}

function keep(where, lines) {
  known.delete(where);
  known.set(where, lines);
  if (known.size > MOST) known.delete(known.keys().next().value);
}

/** A receipt in sentences. */
export function linesOf({ id, identity, changed }, choice) {
  const { computed } = choice;
  const backend = identity.backend ? `, computed by ${identity.backend}` : "";
  const model = `by ${identity.model}, fingerprint ${identity.fingerprint.slice(0, 16)}…${backend}`;
  return [
    read(choice),
    `computed from token ${count(computed.first)} on: ${count(computed.prompt)} of the prompt, ${count(computed.reply)} of the reply`,
    changed.length ? `${model}; since then changed: ${changed.join(", ")}` : model,
    checks(choice),
    id,
  ].filter(Boolean);
}

function read({ read: { tokens, hash }, prompt_tokens: all, blocks, is_whole: isWhole }) {
  if (!tokens) return `read none of ${counted(all, "token")}: all were computed`;
  const where = hash === null ? "" : `, in blocks up to ${hash.slice(0, 16)}…`;
  const lost = isWhole || hash === null ? "" : `; ${count(blocks.length)} of them are known, others have left the disk`;
  return `read ${count(tokens)} of ${counted(all, "token")} (${share(tokens, all)})${where}${lost}`;
}

function checks({ checked, blocks }) {
  if (checked === null) return "restored blocks are not checked here";
  if (!blocks.length) return null;
  if (checked.differed) return `${counted(checked.differed, "block")} had other bits when computed again, and were dropped`;
  if (!checked.equal) return "none of these blocks was computed again to check it, since the server started";
  return `checked: ${count(checked.equal)} of ${counted(blocks.length, "block")} computed again since the server started, with the same bits`;
}
