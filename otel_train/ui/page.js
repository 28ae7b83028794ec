'use strict';

// The server draws every page whole. This script asks for it again and changes what has changed, in place: focus,
// scrolling, what is unfolded and what is zoomed stay as the reader left them.

const statusLine = document.getElementById('status');
let mark = '', timer = 0, asked = null, offline = false, readAt = Date.now();

function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName || old.id !== fresh.id) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  if (old.classList.contains('flame')) {
    if (old.dataset.source !== fresh.innerHTML.length + fresh.textContent) old.replaceWith(fresh);
    return;
  }
  if (old.classList.contains('flame-text')) return;
  for (const {name} of [...old.attributes])
    if (!fresh.hasAttribute(name) && !(name === 'open' && old.nodeName === 'DETAILS')) old.removeAttribute(name);
  for (const {name, value} of fresh.attributes)
    if (old.getAttribute(name) !== value && !(name === 'open' && old.nodeName === 'DETAILS')) old.setAttribute(name, value);
  if (old.nodeName === 'TIME') return;
  if (old.nodeName === 'OPTION') old.selected = fresh.hasAttribute('selected');
  const now = [...old.childNodes], then = [...fresh.childNodes];
  then.forEach((node, place) => now[place] ? morph(now[place], node) : old.append(node));
  for (const node of now.slice(then.length)) node.remove();
}

function ago(seconds) {
  if (seconds < 60) return Math.max(0, Math.floor(seconds)) + ' s ago';
  if (seconds < 3600) return Math.floor(seconds / 60) + ' min ago';
  return seconds < 86400 ? Math.floor(seconds / 3600) + ' h ago' : null;
}

function times() {
  for (const each of document.querySelectorAll('time[data-at]')) {
    const at = new Date(each.dataset.at * 1000), words = ago((Date.now() - at) / 1000);
    const text = words || at.toLocaleString(undefined, {dateStyle: 'medium', timeStyle: 'short'});
    if (each.textContent !== text) each.textContent = text;
    const title = at.toLocaleString();
    if (each.title !== title) each.title = title;
  }
}

function decorate() {
  const fresh = [...document.querySelectorAll('.flame')].filter(box => !box.dataset.source);
  for (const box of fresh) box.dataset.source = box.innerHTML.length + box.textContent;
  if (fresh.length) flames();
  scrollers();
  times();
}

function say(text) {
  if (statusLine.textContent !== text) statusLine.textContent = text;
  statusLine.classList.toggle('offline', offline);
}

async function load(address) {
  if (asked) asked.abort();
  const mine = asked = new AbortController(), limit = setTimeout(() => mine.abort(), 60000);
  clearTimeout(timer);
  try {
    const answer = await fetch(address, {cache: 'no-store', signal: mine.signal, headers: mark ? {'If-None-Match': mark} : {}});
    if (answer.status === 503) throw new Error('still reading');
    if (answer.status !== 304) {
      const page = new DOMParser().parseFromString(await answer.text(), 'text/html'), main = page.getElementById('main');
      if (!main) throw new Error('no page of ours');
      if (mine !== asked) return;
      mark = answer.headers.get('ETag') || '';
      document.title = page.title;
      document.body.dataset.every = page.body.dataset.every;
      morph(document.querySelector('.top nav'), page.querySelector('.top nav'));
      morph(document.getElementById('main'), main);
      decorate();
    }
    offline = false;
    readAt = Date.now();
    say('');
  } catch (fault) {
    if (mine !== asked) return;
    offline = true;
    say('otel-train ui does not answer: last update at ' + new Date(readAt).toLocaleTimeString());
  } finally {
    clearTimeout(limit);
    if (mine === asked) {
      asked = null;
      schedule();
    }
  }
}

function schedule() {
  clearTimeout(timer);
  const every = offline ? 3 : +document.body.dataset.every;
  if (every && !document.hidden) timer = setTimeout(() => load(location.href), every * 1000);
}

function go(address, {replace = false} = {}) {
  mark = '';
  history[replace ? 'replaceState' : 'pushState'](null, '', address);
  return load(address);
}

document.addEventListener('click', event => {
  const link = event.target.closest('a[role=tab], a[data-go]');
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  if (link.role === 'tab') link.focus();
  go(link.href);
});

document.addEventListener('keydown', event => {
  const tab = event.target.closest('[role=tab]');
  if (!tab || event.ctrlKey || event.metaKey || event.altKey) return;
  const tabs = [...tab.parentElement.children], at = tabs.indexOf(tab), last = tabs.length - 1;
  const to = {ArrowRight: at < last ? at + 1 : 0, ArrowLeft: at ? at - 1 : last, Home: 0, End: last, ' ': at}[event.key];
  if (to === undefined) return;
  event.preventDefault();
  tabs[to].focus();
  go(tabs[to].href);
});

document.addEventListener('change', event => {
  if (!event.target.matches('.ranks select')) return;
  const address = new URL(location.href);
  address.searchParams.set('rank', event.target.value);
  address.searchParams.delete('capture');
  go(address.href);
});

let typing = 0;
document.addEventListener('input', event => {
  if (!event.target.matches('.filter input')) return;
  clearTimeout(typing);
  typing = setTimeout(() => {
    const words = event.target.value.trim();
    go(words ? '/?filter=' + encodeURIComponent(words) : '/', {replace: true});
  }, 150);
});

document.addEventListener('submit', event => event.preventDefault());
addEventListener('popstate', () => { mark = ''; load(location.href); });
document.addEventListener('visibilitychange', () => document.hidden ? clearTimeout(timer) : load(location.href));

decorate();
setInterval(times, 1000);
schedule();
