// The only place that changes the screen. Texts from the server are set as text, never as HTML; what
// has not changed is left alone, so that nothing flickers, loses its focus or is read out again.

export function byId(id) {
  return document.getElementById(id);
}

export function make(tag, className = "", text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text) node.textContent = text;
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setHidden(node, hidden) {
  if (node.hidden !== hidden) node.hidden = hidden;
}

export function setData(node, name, value) {
  if (node.dataset[name] !== value) node.dataset[name] = value;
}

// Makes the children of `parent` those of `items`, in order: one node a key, kept as long as its
// key is there. create() makes a node, update(node, item) fills it.
export function keyed(parent, items, keyOf, create, update) {
  const known = new Map();
  for (const node of parent.children) known.set(node.dataset.key, node);
  const wanted = items.map((item) => [String(keyOf(item)), item]);
  const keys = new Set(wanted.map(([key]) => key));
  for (const [key, node] of known) if (!keys.has(key)) node.remove();
  let next = parent.firstElementChild;
  for (const [key, item] of wanted) {
    let node = known.get(key);
    if (node === undefined) {
      node = create();
      node.dataset.key = key;
      known.set(key, node);
      parent.insertBefore(node, next);
    } else if (node === next) {
      next = next.nextElementSibling;
    } else if (node.isConnected && parent.moveBefore) {
      parent.moveBefore(node, next); // keeps the focus
    } else {
      parent.insertBefore(node, next);
    }
    update(node, item);
  }
}

// A table row whose cells are [label, text, className?]; the labels stand beside the cells where the
// table is too narrow for a head.
export function setCells(row, cells) {
  while (row.children.length < cells.length) {
    const cell = make(row.children.length ? "td" : "th");
    if (cell.tagName === "TH") cell.scope = "row";
    row.append(cell);
  }
  cells.forEach(([label, text, className = ""], index) => {
    const cell = row.children[index];
    setData(cell, "label", label);
    if (cell.className !== className) cell.className = className;
    setText(cell, text);
  });
}
