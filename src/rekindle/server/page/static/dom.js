// Elements out of values. Text is only ever text: nothing here takes HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.setAttribute("class", value);
    else if (name === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (name === "vars") for (const [key, each] of Object.entries(value)) node.style.setProperty(key, each);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** An element; `on` holds listeners, `vars` CSS variables, anything else is an attribute; children are nodes or text. */
export function el(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** An element of a drawing. */
export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

/** The element of the page with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Set text where it differs, so that nothing is announced or painted twice. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/**
 * Make the children of `parent` stand for `items`, in order. A child stays the same element while its key stays, so
 * focus and scroll stay, too; where `stamp` says that nothing changed it is left alone, else it is made anew inside.
 */
export function keyed(parent, items, { key, make, update }) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let next = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let node = known.get(name);
    known.delete(name);
    if (node === undefined) {
      node = make(item);
      node.dataset.key = name;
    }
    const stamp = JSON.stringify(item);
    if (node.stamp !== stamp) {
      node.stamp = stamp;
      update?.(node, item);
    }
    if (node === next) next = next.nextElementSibling;
    else parent.insertBefore(node, next);
  }
  for (const gone of known.values()) gone.remove();
}
