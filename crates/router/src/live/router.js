// The router's part of the live page.
{
  const set = {};

  // The time within which this share of the first tokens of the last ten minutes came, as histogram_quantile estimates it.
  function firstToken(share, bounds) {
    const counts = bounds.concat(Infinity).map((_, bucket) => total(`first_${bucket}`));
    const all = counts.reduce((sum, count) => sum + count, 0);
    if (all < 0.5) return null;
    let before = 0;
    for (let bucket = 0; bucket < bounds.length; bucket += 1) {
      if (before + counts[bucket] >= share * all && counts[bucket] > 0) {
        const low = bucket === 0 ? 0 : bounds[bucket - 1];
        return low + ((bounds[bucket] - low) * (share * all - before)) / counts[bucket];
      }
      before += counts[bucket];
    }
    return bounds[bounds.length - 1];
  }

  function build() {
    set.problems = problemList();
    const traffic = cards(section('Requests'));
    set.requests = card(traffic, 'Requests', 'perSecond', 'requests');
    set.errors = card(traffic, 'Errors of 500 and above', 'perSecond', 'errors');
    set.refused = card(traffic, 'Refused for lack of an engine', 'perSecond', 'refused');
    set.retries = card(traffic, 'Retries', 'perSecond', 'retries');
    set.median = card(traffic, 'First token, median of ten minutes', 'seconds');
    set.late = card(traffic, 'First token, 95th percentile', 'seconds');
    set.generated = card(traffic, 'Tokens generated', 'perSecond', 'generated_tokens');
    set.prompts = card(traffic, 'Prompt tokens', 'perSecond', 'prompt_tokens');
    set.cached = gauge(traffic, 'Of them probably cached, ten minutes');
    set.connections = card(traffic, 'Clients connected', 'count', 'connections');
    const why = (row) => [row.condition, row.prefixes_why].filter(Boolean).join('; ');
    set.nodes = table(section('Engines'), 'Engines', [
      ['Engine', 'text', 'node'], ['Role', 'text', 'role'], ['State', 'text', 'state'], ['Requests', 'count', 'requests'],
      ['Of others', 'count', 'other_requests'], ['Tokens to prefill', 'count', 'prefill_tokens'],
      ['KV cache', 'ratio', 'cache_used'], ['Prefixes known', 'text', 'prefixes'], ['Model', 'text', 'models'], ['Notes', 'text', why],
    ], 'none.');
    const ago = (row) => Math.max(0, set.now - row.time);
    set.decisions = table(section('Last choices'), 'Choices of engines', [
      ['Ago', 'seconds', ago], ['Model', 'text', 'model'], ['Prefill', 'text', 'prefill'], ['Engine', 'text', 'node'],
      ['Why', 'text', 'why'], ['Prompt tokens', 'count', 'prompt_tokens'], ['Probably cached', 'count', 'cached_tokens'],
      ['Candidates', 'count', 'candidates'], ['Attempt', 'count', 'attempt'],
    ], 'none yet.');
  }

  function update(figures) {
    const sum = Object.values(figures.requests_by_status).reduce((all, count) => all + count, 0);
    set.problems(figures.problems);
    const statuses = Object.entries(figures.requests_by_status).map(([status, count]) => `${status}: ${format.count(count)}`);
    set.requests(latest('requests'), `${format.count(sum)} since the start`);
    set.errors(latest('errors'), statuses.join(', '));
    set.refused((latest('refused') || 0) + (latest('shed') || 0),
      `since the start no engine: ${format.count(figures.refused)}, overload: ${format.count(figures.shed)}`);
    set.retries(latest('retries'));
    const bounds = figures.first_token_bounds_seconds;
    set.median(firstToken(0.5, bounds));
    set.late(firstToken(0.95, bounds));
    set.generated(latest('generated_tokens'));
    set.prompts(latest('prompt_tokens'));
    set.cached(total('prompt_tokens') ? total('cached_tokens') / total('prompt_tokens') : null);
    set.connections(figures.connections, `${format.bytes(figures.body_bytes)} of requests in memory`);
    set.nodes(figures.nodes);
    set.now = figures.now;
    set.decisions(figures.decisions);
  }

  show(build, update);
}
