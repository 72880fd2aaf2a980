// Replies as Markdown, made into elements: headings, lists, quotes, tables, code, emphasis, links. HTML in them stays text.
//
// A model writes this, so it is bounded: each character is looked at a few times, nesting ends at DEEPEST, and nothing is
// loaded: an image is a link to it. Links are to http, https and mailto, and are told nothing of this page.

import { el } from "./dom.js";

const DEEPEST = 8;
const LONGEST_LINK = 4000; // characters with its label
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})(?=\s|$)/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}>\s?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:\s+|$)(.*)$/;
const COLUMNS = /^\|? *:?-+:? *(?:\| *:?-+:? *)*\|?$/; // of a line without blanks around it
const MARKS = { "**": "strong", __: "strong", "~~": "s", "*": "em", _: "em" };
const SAFE = /^(?:https?|mailto):/i;
const ADDRESS = /https?:\/\/[^\s<>]+/iy;

/** Show a text in `parent`; blocks that have not changed stay the same elements, as a reply grows at its end. */
export function render(parent, text) {
  const found = blocks(text.replaceAll("\t", "    ").split(/\r?\n/));
  found.forEach(({ source, make }, at) => {
    const before = parent.children[at];
    if (before?.source === source) return;
    const node = make(0);
    node.source = source;
    if (before) before.replaceWith(node);
    else parent.append(node);
  });
  while (parent.children.length > found.length) parent.lastElementChild.remove();
}

/** An element that shows a text. */
export function markdown(text) {
  const node = el("div", { class: "words text" });
  render(node, text);
  return node;
}

/** The blocks of these lines, each with its source and a function that makes its element at a depth of nesting. */
function blocks(lines) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [end, make] = block(lines, at);
    found.push({ source: lines.slice(at, end).join("\n"), make });
    at = end;
  }
  return found;
}

function block(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at, fence[1]);
  const heading = HEADING.exec(line);
  if (heading) {
    const title = line.slice(heading[0].length).trim().replace(/(^|\s)#+$/, "").trim();
    return [at + 1, (depth) => el(`h${Math.min(6, heading[1].length + 2)}`, {}, inline(title, depth))];
  }
  if (RULE.test(line)) return [at + 1, () => el("hr")];
  if (QUOTE.test(line)) return quote(lines, at);
  if (ITEM.test(line)) return list(lines, at);
  if (isTable(lines, at)) return table(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !begins(lines, end)) end += 1;
  const text = lines.slice(at, end).map((each) => each.trim()).join("\n");
  return [end, (depth) => el("p", {}, inline(text, depth))];
}

/** Whether a line ends a paragraph before it. */
function begins(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line) || isTable(lines, at);
}

/** Code up to its closing fence, or up to the end while that is still to come. */
function code(lines, at, fence) {
  let end = at + 1;
  const isClosing = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
  while (end < lines.length && !isClosing(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).join("\n");
  return [Math.min(end + 1, lines.length), () => el("pre", { tabindex: 0 }, el("code", {}, text))];
}

function quote(lines, at) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [end, (depth) => el("blockquote", {}, nested(inner, depth))];
}

function list(lines, at) {
  const [, indent, first] = ITEM.exec(lines[at]);
  const isNumbered = /\d/.test(first);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    const isOwn = item && item[1].length <= indent.length + 1 && !RULE.test(lines[end]);
    const isInside = lines[end].search(/\S/) > indent.length + 1;
    if (isOwn && /\d/.test(item[2]) === isNumbered) items.push([item[3]]);
    else if (!lines[end].trim() && continues(lines, end + 1, indent.length, isNumbered)) items.at(-1).push("");
    else if (isInside || (lines[end].trim() && lines[end - 1].trim() && !begins(lines, end))) items.at(-1).push(lines[end]);
    else break;
    end += 1;
  }
  const start = isNumbered && Number.parseInt(first, 10) !== 1 ? Number.parseInt(first, 10) : null;
  return [end, (depth) => el(isNumbered ? "ol" : "ul", { start }, items.map((item) => el("li", {}, nested(unindented(item), depth, "item"))))];
}

/** Whether a list goes on after an empty line. */
function continues(lines, at, indent, isNumbered) {
  const line = lines[at] ?? "";
  const item = ITEM.exec(line);
  return line.search(/\S/) > indent + 1 || (item !== null && item[1].length <= indent + 1 && /\d/.test(item[2]) === isNumbered);
}

/** The lines of an item without the blanks that all but its first have in common. */
function unindented([first, ...rest]) {
  const least = Math.min(...rest.filter((line) => line.trim()).map((line) => line.search(/\S/)), 80);
  return [first, ...rest.map((line) => line.slice(least))];
}

/** Elements of lines inside another block; an item of one paragraph is its text alone. */
function nested(lines, depth, where = "block") {
  if (depth >= DEEPEST) return [lines.join("\n")];
  const made = blocks(lines).map(({ make }) => make(depth + 1));
  return where === "item" && made[0]?.tagName === "P" ? [...made[0].childNodes, ...made.slice(1)] : made;
}

function isTable(lines, at) {
  return lines[at].includes("|") && (lines[at + 1] ?? "").includes("-") && COLUMNS.test(lines[at + 1].trim()) && cells(lines[at]).length === cells(lines[at + 1]).length;
}

function table(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const head = cells(lines[at]);
  const rows = lines.slice(at + 2, end).map(cells);
  const row = (tag, texts, depth) => el("tr", {}, head.map((_, column) => el(tag, {}, inline(texts[column] ?? "", depth))));
  return [end, (depth) => el("table", {}, el("thead", {}, row("th", head, depth)), el("tbody", {}, rows.map((texts) => row("td", texts, depth))))];
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/([^\\]|^)\|$/, "$1");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.replaceAll("\\|", "|").trim());
}

/** Nodes of a text within a block. A mark that was found not to be closed is not looked for again. */
function inline(text, depth) {
  const nodes = [];
  const unclosed = new Set();
  let plain = "";
  let at = 0;
  while (at < text.length) {
    const found = depth < DEEPEST ? piece(text, at, unclosed, depth) : null;
    if (found === null) plain += text[at++];
    else {
      if (plain) nodes.push(plain);
      plain = "";
      nodes.push(found.node);
      at = found.end;
    }
  }
  return plain ? [...nodes, plain] : nodes;
}

function piece(text, at, unclosed, depth) {
  const sign = text[at];
  if (sign === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) return { node: text[at + 1], end: at + 2 };
  if (sign === "`") return codeSpan(text, at, unclosed);
  if (sign === "[") return link(text, at, unclosed, depth);
  if (sign === "*" || sign === "_" || sign === "~") return emphasis(text, at, unclosed, depth);
  if (sign !== "h" && sign !== "H") return null;
  ADDRESS.lastIndex = at;
  const address = /\w/.test(text[at - 1] ?? "") ? null : ADDRESS.exec(text);
  if (address === null) return null;
  let url = address[0];
  while (".,;:!?)]'\"*_".includes(url.at(-1))) url = url.slice(0, -1);
  return { node: anchor(url, [url]), end: at + url.length };
}

function codeSpan(text, at, unclosed) {
  const fence = /`+/y;
  fence.lastIndex = at;
  const [open] = fence.exec(text);
  let end = unclosed.has(open) ? -1 : text.indexOf(open, at + open.length);
  while (end >= 0 && text[end + open.length] === "`") {
    let after = end;
    while (text[after] === "`") after += 1; // a longer run closes nothing
    end = text.indexOf(open, after);
  }
  if (end < 0) {
    unclosed.add(open);
    return { node: open, end: at + open.length };
  }
  const inner = text.slice(at + open.length, end);
  const isPadded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim();
  return { node: el("code", {}, isPadded ? inner.slice(1, -1) : inner), end: end + open.length };
}

function emphasis(text, at, unclosed, depth) {
  for (const mark of Object.keys(MARKS)) {
    const inside = at + mark.length;
    const isWord = mark[0] === "_" && /\w/.test(text[at - 1] ?? "");
    if (!text.startsWith(mark, at) || isWord || unclosed.has(mark) || /^\s?$/.test(text[inside] ?? "")) continue;
    const end = closing(text, mark, inside);
    if (end > inside) return { node: el(MARKS[mark], {}, inline(text.slice(inside, end), depth + 1)), end: end + mark.length };
    unclosed.add(mark);
  }
  return null;
}

function closing(text, mark, from) {
  for (let end = text.indexOf(mark, from); end >= 0; end = text.indexOf(mark, end + 1)) {
    if (mark.length === 2 && text[end + 2] === mark[0]) end += 1; // the first of three closes what is inside
    const isPart = mark.length === 1 && (text[end + 1] === mark || (text[end - 1] === mark && end > from));
    if (isPart && text[end + 1] === mark) end += 1;
    const isWord = mark[0] === "_" && /\w/.test(text[end + mark.length] ?? "");
    if (!isPart && !isWord && end > from && !/\s/.test(text[end - 1])) return end;
  }
  return -1;
}

function link(text, at, unclosed, depth) {
  const middle = unclosed.has("[") ? -1 : text.indexOf("](", at);
  const end = middle < 0 ? -1 : text.indexOf(")", middle);
  if (end < 0) {
    unclosed.add("[");
    return null;
  }
  if (end - at > LONGEST_LINK) return null;
  const [label, url] = [text.slice(at + 1, middle), text.slice(middle + 2, end).trim().split(/\s/)[0]];
  if (/[[\]\n]/.test(label) || !SAFE.test(url)) return null;
  return { node: anchor(url, inline(label, depth + 1)), end: end + 1 };
}

function anchor(url, children) {
  return el("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}
