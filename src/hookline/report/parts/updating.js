// Update elements in place, so that selection, scroll position and typed text stay while the page is updated.

function lasting(key, make, give) {
  // represents an element that is created once and then updated
  const stand = el("div", {});
  return Object.assign(stand, { key, make, give });
}

function adopt(fresh) {
  // create an element for the first time
  if (fresh.make) return Object.assign(fresh.make(), { key: fresh.key });
  for (const child of [...fresh.childNodes]) {
    const real = adopt(child);
    if (real !== child) child.replaceWith(real);
  }
  return fresh;
}

function keyed(nodes) {
  // match children by their keys, or by their kind; equal ones in their order
  const found = new Map(), counts = new Map();
  for (const node of nodes) {
    const name = node.key === undefined ? `${node.nodeName} ${node.id || ""}` : `= ${node.key}`, count = counts.get(name) || 0;
    counts.set(name, count + 1);
    found.set(`${name} ${count}`, node);
  }
  return found;
}

function fillWith(parent, children) {
  // keep matching children in place, add and remove the others
  const old = keyed(parent.childNodes), wanted = keyed(children);
  for (const [key, node] of old) if (!wanted.has(key)) node.remove();
  let next = parent.firstChild;
  for (const [key, fresh] of wanted) {
    const known = old.get(key);
    if (known) renew(known, fresh);
    if (known && known === next) next = next.nextSibling;
    else parent.insertBefore(known || adopt(fresh), next);
  }
}

function renew(old, fresh) {
  if (fresh.give) return fresh.give(old);
  if (!(old instanceof Element)) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return undefined;
  }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && !(name === "open" && old.tagName === "DETAILS")) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) === value) continue;
    if (name === "style") old.style.cssText = fresh.style.cssText; // the page's policy forbids it as an attribute
    else old.setAttribute(name, value);
  }
  return fillWith(old, [...fresh.childNodes]);
}
