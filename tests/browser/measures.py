"""What a test measures on a page, as JavaScript: contrast, overflow, names of controls, changes."""

from __future__ import annotations

# The least contrast (WCAG) of any text that can be seen, with the text.
CONTRAST = """(() => {
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const channel = (value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  };
  const luminance = ([red, green, blue]) =>
    0.2126 * channel(red) + 0.7152 * channel(green) + 0.0722 * channel(blue);
  const paper = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = parse(getComputedStyle(at).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let least = [99, ''], seen = 0;
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    const text = walker.currentNode.data.trim();
    if (!text || !node.checkVisibility() || node.closest('.unseen, noscript, thead')) continue;
    const pair = [luminance(parse(getComputedStyle(node).color)), luminance(paper(node))];
    const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    seen += 1;
    if (ratio < least[0]) least = [ratio, text];
  }
  return [...least, seen];
})()"""

# Elements that reach beyond the right edge of the window.
OVERFLOW = """[...document.querySelectorAll('body *')].filter((node) =>
  node.checkVisibility() && !node.closest('.unseen, thead') &&
  node.getBoundingClientRect().right > innerWidth + 0.5).map((node) => node.outerHTML.slice(0, 120))
"""

# Texts that do not fit into their cell.
CLIPPED = """[...document.querySelectorAll('td, th, dd, .words, button')].filter((node) =>
  node.checkVisibility() && !node.closest('thead') && node.scrollWidth > node.clientWidth + 1)
  .map((node) => node.outerHTML.slice(0, 120))"""

# Counts from now on which nodes come and go, and which texts change, anywhere on the page.
WATCH_CHANGES = """(() => {
  window.changes = [];
  new MutationObserver((found) => {
    for (const one of found) window.changes.push(`${one.type} ${one.target.nodeName} ` +
      `${one.target.id ?? ''} ${one.target.textContent.slice(0, 40)}`);
  }).observe(document.body,
    { subtree: true, childList: true, characterData: true, attributes: true });
})()"""
