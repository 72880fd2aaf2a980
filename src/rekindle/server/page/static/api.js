// Requests to the server this page came from, with the key, if one was given. The key stays in this tab.

const KEPT = "rekindle-key";
const PATIENCE_MS = 20_000;

/** The server answered, and refused: `status`, what it says, and the answer, null if it is no JSON. */
export class Refused extends Error {
  constructor(status, message, answer = null) {
    super(message);
    this.status = status;
    this.answer = answer;
  }
}

/** The server did not answer. */
export class Unreachable extends Error {}

export function hasKey() {
  return sessionStorage.getItem(KEPT) !== null;
}

export function keepKey(key) {
  sessionStorage.setItem(KEPT, key);
}

export function forgetKey() {
  sessionStorage.removeItem(KEPT);
}

function headersOf(more) {
  const key = sessionStorage.getItem(KEPT);
  return { ...(key ? { Authorization: `Bearer ${key}` } : {}), ...more };
}

/** Where a path of the server is: next to this page, which may be one of several models' under /models/NAME/. */
export function here(path) {
  return new URL(path.replace(/^\//, ""), document.baseURI);
}

async function sent(method, path, { body, headers = {}, signal } = {}) {
  const isFile = body instanceof Blob;
  const type = body === undefined ? {} : { "Content-Type": isFile ? "application/octet-stream" : "application/json" };
  const options = { method, headers: headersOf({ ...type, ...headers }), signal, cache: "no-store" };
  if (body !== undefined) options.body = isFile ? body : JSON.stringify(body);
  let response;
  try {
    response = await fetch(here(path), options);
  } catch (error) {
    if (signal?.aborted && signal.reason?.name !== "TimeoutError") throw error;
    throw new Unreachable("the server does not answer");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const answer = await response.json().catch(() => null);
  return new Refused(response.status, answer?.error?.message ?? `status ${response.status}, and no reason`, answer);
}

/** The JSON answer to a request; Refused or Unreachable. */
export async function ask(method, path, { body, patience = PATIENCE_MS } = {}) {
  const signal = patience ? AbortSignal.timeout(patience) : undefined;
  const response = await sent(method, path, { body, signal });
  try {
    return await response.json();
  } catch {
    throw new Unreachable("the answer broke off");
  }
}

/** The JSON answer to a file that is sent, however long that takes; Refused or Unreachable. */
export async function upload(path, file) {
  return ask("POST", path, { body: file, patience: 0 });
}

/** Save what the server answers as a file, once all of it is here: a link could send no key, and not say what failed. */
export async function download(path, name) {
  const response = await sent("GET", path);
  let content;
  try {
    content = await response.blob();
  } catch {
    throw new Unreachable("the file broke off");
  }
  const url = URL.createObjectURL(content);
  saveAs(url, name);
  setTimeout(() => URL.revokeObjectURL(url), PATIENCE_MS);
}

function saveAs(url, name) {
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
}

/**
 * Server-sent events as they come: {name, data}. `onOpen` is told when the server has accepted. An abort ends them
 * with an AbortError, a connection that breaks with Unreachable.
 */
export async function* events(method, path, { body, headers, signal, onOpen } = {}) {
  const response = await sent(method, path, { body, headers, signal });
  onOpen?.();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await next(reader, signal);
    if (done) return;
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const event = read(part);
      if (event !== null) yield event;
    }
  }
}

async function next(reader, signal) {
  try {
    return await reader.read();
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Unreachable("the connection broke off");
  }
}

function read(part) {
  let name = "message";
  const data = [];
  for (const line of part.split(/\r?\n/)) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  const text = data.join("\n");
  return !data.length || text === "[DONE]" ? null : { name, data: JSON.parse(text) };
}
