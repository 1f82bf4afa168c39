'use strict';
// What the pages of all programs share. A script calls show(build, update): `build` makes the page once, and `update(figures)`
// gets each answer of /live. Names come from engines and clients, so they are only ever set as text.

const SAMPLES = 600;
const series = {};

function element(name, parent, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  if (parent) parent.append(made);
  return made;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Formats, each from a number, or null where there is none.
const digits = (value) => (value >= 100 ? 0 : value >= 10 ? 1 : 2);
function scaled(value, units, step) {
  let at = 0;
  while (at < units.length - 1 && value >= step) { value /= step; at += 1; }
  return `${at === 0 && Number.isInteger(value) ? value : value.toFixed(digits(value))} ${units[at]}`;
}
const format = {
  bytes: (value) => scaled(value, ['B', 'kB', 'MB', 'GB', 'TB', 'PB'], 1000),
  rate: (value) => `${format.bytes(value)}/s`,
  count: (value) => Math.round(value).toLocaleString('en'),
  perSecond: (value) => `${value === 0 ? 0 : value >= 100 ? format.count(value) : value.toFixed(digits(value))}/s`,
  ratio: (value) => `${(100 * value).toFixed(1)} %`,
  seconds: (value) => {
    if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
    if (value < 1) return `${(value * 1e3).toFixed(digits(value * 1e3))} ms`;
    if (value < 120) return `${value.toFixed(1)} s`;
    if (value < 7200) return `${(value / 60).toFixed(0)} min`;
    if (value < 172800) return `${(value / 3600).toFixed(1)} h`;
    return `${(value / 86400).toFixed(1)} days`;
  },
  text: (value) => String(value),
};
const written = (kind, value) => (value === null || value === undefined ? '–' : format[kind](value));

function section(title) {
  const made = element('section', document.getElementById('main'));
  const head = element('h2', made, title);
  head.id = title.toLowerCase().replace(/[^a-z]+/g, '-');
  made.setAttribute('aria-labelledby', head.id);
  return made;
}

const cards = (parent) => element('div', parent, undefined, 'cards');

function sparkline(parent, label, kind, name) {
  const draw = (tag, className, into) => {
    const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
    if (className) made.setAttribute('class', className);
    into.append(made);
    return made;
  };
  const svg = draw('svg', '', parent);
  svg.setAttribute('viewBox', `0 0 ${SAMPLES} 100`);
  svg.setAttribute('preserveAspectRatio', 'none');
  svg.setAttribute('role', 'img');
  const area = draw('path', 'area', svg);
  const edge = draw('path', 'edge', svg);
  return () => {
    const values = series[name] || [];
    const top = values.reduce((most, value) => Math.max(most, value || 0), 0);
    const y = (value) => (top > 0 ? 97 - (94 * (value || 0)) / top : 97).toFixed(1);
    // The chart grows with the history, from one minute to ten.
    const step = SAMPLES / Math.max(60, values.length);
    const x = (at) => (SAMPLES - (values.length - at - 0.5) * step).toFixed(1);
    const line = values.map((value, at) => `${x(at)} ${y(value)}`).join('L');
    edge.setAttribute('d', line ? `M${line}` : '');
    area.setAttribute('d', line ? `M${x(0)} 100L${line}L${x(values.length - 1)} 100Z` : '');
    svg.setAttribute('aria-label', `${label}, up to ten minutes: at most ${format[kind](top)}`);
  };
}

// A figure, with a chart of a series if `spark` names one. Returns set(value, hint).
function card(parent, label, kind, spark) {
  const made = element('div', parent, undefined, 'card');
  element('h3', made, label);
  const value = element('p', made, '–', 'value');
  const hint = element('p', made, '', 'hint');
  const redraw = spark ? sparkline(made, label, kind, spark) : () => {};
  return (figure, more = '') => {
    setText(value, written(kind, figure));
    setText(hint, more);
    redraw();
  };
}

// A share beside its bound. Returns set(share, bound, hint).
function gauge(parent, label, boundName) {
  const made = element('div', parent, undefined, 'card');
  element('h3', made, label);
  const value = element('p', made, '–', 'value');
  const bar = element('div', made, undefined, 'bar');
  bar.setAttribute('role', 'img');
  const fill = element('i', bar);
  const mark = boundName ? element('b', bar) : null;
  const hint = element('p', made, '', 'hint');
  return (share, bound, more = '') => {
    const none = share === null || share === undefined;
    setText(value, written('ratio', share));
    fill.style.width = `${none ? 0 : Math.min(100, 100 * share)}%`;
    if (mark) {
      mark.hidden = bound === null || bound === undefined;
      mark.style.left = `calc(${Math.min(100, 100 * (bound || 0))}% - 3px)`;
    }
    const beside = boundName && !none ? `${boundName} ${written('ratio', bound)}` : '';
    const sentence = [beside, more].filter(Boolean).join('; ');
    setText(hint, sentence);
    bar.setAttribute('aria-label', `${label}: ${written('ratio', share)}${beside ? `, ${beside}` : ''}`);
  };
}

// A table; `columns` are [head, kind, member] or [head, kind, function of the row]. Returns set(rows).
function table(parent, caption, columns, nothing) {
  const box = element('div', parent, undefined, 'scroll');
  box.tabIndex = 0;
  box.setAttribute('role', 'region');
  box.setAttribute('aria-label', caption);
  const made = element('table', box);
  const title = element('caption', made, caption);
  const head = element('tr', element('thead', made));
  const side = (kind) => (kind === 'text' ? '' : 'number');
  for (const [name, kind] of columns) element('th', head, name, side(kind)).scope = 'col';
  const body = element('tbody', made);
  return (rows) => {
    setText(title, rows.length ? `${caption}: ${format.count(rows.length)}` : `${caption}: ${nothing}`);
    while (body.rows.length > rows.length) body.lastElementChild.remove();
    rows.forEach((row, at) => {
      const line = body.rows[at] || element('tr', body);
      columns.forEach(([, kind, member], column) => {
        const cell = line.cells[column] || element('td', line, undefined, side(kind));
        const text = written(kind, typeof member === 'function' ? member(row) : row[member]);
        if (cell.textContent !== text) { cell.textContent = text; cell.title = kind === 'text' ? text.slice(0, 4096) : ''; }
      });
    });
  };
}

// The problems, in plain words. Returns set(problems).
function problemList() {
  const made = section('Problems');
  const list = element('ul', made, undefined, 'problems');
  const none = element('p', made, 'None.', 'hint');
  return (problems) => {
    none.hidden = problems.length > 0;
    const texts = problems.map((problem) => `${problem.severity}: ${problem.text} ${problem.action}`);
    if (list.dataset.shown === texts.join('\n')) return;
    list.dataset.shown = texts.join('\n');
    list.replaceChildren(...problems.map((problem, at) => element('li', null, texts[at], problem.severity)));
  };
}

function addSamples(history) {
  for (const [name, values] of Object.entries(history.series)) {
    const held = history.first === 0 || !series[name] || history.first !== series[name].next ? [] : series[name];
    const all = held.concat(values).slice(-SAMPLES);
    all.next = history.next;
    series[name] = all;
  }
}

// The last number of a series, and sums over a series.
const latest = (name) => ((series[name] || []).length ? series[name][series[name].length - 1] : null);
const total = (name) => (series[name] || []).reduce((sum, value) => sum + (value || 0), 0);

// A screen reader reads out each change of the state. So what changes every second stands beside it, as the age.
function show(build, update) {
  const state = document.getElementById('state');
  const age = document.getElementById('age');
  let next = 0;
  let run = null;
  let version = null;
  let answeredAt = null;
  let timer = null;
  let isAsking = false;

  function say(text, more, isLost) {
    setText(state, text);
    setText(age, more);
    state.classList.toggle('lost', isLost);
  }

  async function look() {
    timer = null;
    isAsking = true;
    let pause = 1000;
    try {
      const answer = await fetch(`/live?after=${next}`, { cache: 'no-store', signal: AbortSignal.timeout(5000) });
      if (!answer.ok) throw new Error(`it answered ${answer.status}`);
      const figures = await answer.json();
      answeredAt = Date.now();
      if (run !== null && version !== figures.version) location.reload();
      version = figures.version;
      if (run !== figures.run) {
        // The first answer, or another process. That one numbers its samples anew, and may have other sections.
        run = figures.run;
        for (const name of Object.keys(series)) delete series[name];
        document.getElementById('main').replaceChildren();
        build(figures);
        if (next !== 0) {
          next = 0;
          pause = 0;
          return;
        }
      }
      addSamples(figures.history);
      next = figures.history.next;
      update(figures);
      say(`${figures.version}, ${figures.state}`, `up ${format.seconds(figures.uptime_seconds)}`, figures.state !== 'ok');
    } catch (error) {
      const old = answeredAt === null ? '' : `The figures are ${format.seconds((Date.now() - answeredAt) / 1000)} old.`;
      const why = error instanceof TypeError || error.name === 'TimeoutError' ? '' : ` (${error.message})`;
      say(`No answer${why}; trying again every second.`, old, true);
    } finally {
      isAsking = false;
      again(pause);
    }
  }

  // One question at a time, because two answers with the same samples would not fit together.
  function again(ms) {
    if (timer === null && !isAsking && !document.hidden) timer = setTimeout(look, ms);
  }

  document.addEventListener('visibilitychange', () => {
    if (document.hidden) { clearTimeout(timer); timer = null; } else again(0);
  });
  look();
}
