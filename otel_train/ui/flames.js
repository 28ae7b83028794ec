'use strict';

// Tables: only one that can be scrolled is a stop of the keyboard.
function scrollers() {
  for (const box of document.querySelectorAll('.scroll')) {
    const wide = box.scrollWidth > box.clientWidth, label = box.dataset.label || box.getAttribute('aria-label');
    box.dataset.label = label;
    for (const [name, value] of [['tabindex', 0], ['role', 'region'], ['aria-label', label]])
      wide ? box.setAttribute(name, value) : box.removeAttribute(name);
  }
}
addEventListener('resize', scrollers);

// The boxes of flame graphs: arrow keys move, Enter or a click zooms in, Escape out.
function flames() {
  for (const box of document.querySelectorAll('.flame')) {
    const all = [...box.querySelectorAll('button')], text = box.nextElementSibling;
    const of = b => ({s: +b.dataset.s, w: +b.dataset.w, d: +b.dataset.d, p: +b.dataset.p});
    const zoom = b => {
      const z = b ? of(b) : {s: 0, w: 1, d: 0};
      for (const each of all) {
        const e = of(each), inside = e.s < z.s + z.w - 1e-9 && e.s + e.w > z.s + 1e-9;
        each.hidden = !inside;
        const left = Math.max(0, (e.s - z.s) / z.w), right = Math.min(1, (e.s + e.w - z.s) / z.w);
        each.style.left = 100 * left + '%'; each.style.width = 100 * (right - left) + '%';
      }
    };
    const go = b => { if (b && !b.hidden) { for (const each of all) each.tabIndex = -1; b.tabIndex = 0; b.focus(); } };
    const beside = (b, by) => {
      const row = all.filter(each => of(each).d === of(b).d && !each.hidden).sort((x, y) => of(x).s - of(y).s);
      return row[row.indexOf(b) + by];
    };
    box.addEventListener('focusin', event => { text.textContent = event.target.title; });
    box.addEventListener('mouseover', event => { if (event.target.title) text.textContent = event.target.title; });
    box.addEventListener('click', event => { if (event.target.tagName === 'BUTTON') zoom(event.target); });
    box.addEventListener('keydown', event => {
      const b = event.target, at = all.indexOf(b);
      const to = {ArrowRight: () => beside(b, 1), ArrowLeft: () => beside(b, -1), ArrowUp: () => all[of(b).p],
        ArrowDown: () => all.find(each => of(each).p === at && !each.hidden)}[event.key];
      if (to) { go(to()); event.preventDefault(); }
      if (event.key === 'Escape') { zoom(null); go(b); }
    });
  }
}
