// The daemon's part of the live page.
{
  let set;
  const recentMean = (sum, count) => (total(count) > 0 ? total(sum) / total(count) : null);

  function build(figures) {
    set = { problems: problemList() };

    const pays = section('Does it pay?');
    const gauges = cards(pays);
    const windows = cards(pays);
    set.windows = new Map();
    set.gauge = (window) => {
      if (!set.windows.has(window)) set.windows.set(window, gauge(gauges, `Hits of the last ${window}`, 'without a limit'));
      return set.windows.get(window);
    };
    set.hits = card(windows, 'Bytes hit', 'rate', 'hit_bytes');
    set.lookups = card(windows, 'Blocks looked up and hit', 'perSecond', 'hit_blocks');
    set.ram = card(windows, 'Hit in RAM since the start', 'bytes');
    set.lower = card(windows, 'Hit on SSD and other hosts', 'bytes');

    const pool = cards(section('Pool'));
    set.used = gauge(pool, 'Used');
    set.blocks = card(pool, 'Blocks', 'count');
    set.saves = card(pool, 'Saved', 'rate', 'saved_bytes');
    set.seals = card(pool, 'Blocks that wait for their checksum', 'count', 'seal_queue_blocks');
    set.evictions = card(pool, 'Evicted', 'rate', 'evicted_bytes');
    set.residence = card(pool, 'Evicted blocks had stayed', 'seconds');
    set.unsaved = card(pool, 'Not saved for lack of room', 'perSecond', 'unsaved_blocks');

    if (figures.ssd) {
      const ssd = cards(section('SSD'));
      set.ssdUsed = card(ssd, 'Blocks on the SSD', 'bytes');
      set.ssdReads = card(ssd, 'Read', 'rate', 'ssd_read_bytes');
      set.ssdWrites = card(ssd, 'Written', 'rate', 'ssd_written_bytes');
      set.ssdLatency = card(ssd, 'A block takes to read', 'seconds');
      set.ssdWaiting = card(ssd, 'Blocks that wait to be written', 'count');
    }
    if (figures.cluster) {
      const hosts = cards(section('Other hosts'));
      set.members = card(hosts, 'Daemons reached', 'text');
      set.fetched = card(hosts, 'Fetched from them', 'rate', 'peer_bytes');
      set.lent = card(hosts, 'Lent to them', 'rate', 'lent_bytes');
      set.announced = card(hosts, 'Blocks announced to the index', 'count');
    }
    const engines = section('Engines');
    const work = cards(engines);
    set.sessions = card(work, 'Workers connected', 'count');
    set.waiting = card(work, 'Lookups that wait for another engine', 'count', 'waiting_lookups');
    set.handOffs = card(work, 'Hand-offs through the daemon', 'perSecond', 'hand_offs');
    // A daemon has links from the first load of a GPU on.
    set.links = () => (set.linkCard ||= card(work, 'Loaded over GPU links', 'rate', 'link_bytes'));
    const rate = (row) => {
      const asked = row.hit_blocks + row.missed_blocks;
      return asked ? row.hit_blocks / asked : null;
    };
    set.models = table(element('div', engines), 'Models', [
      ['Model', 'text', 'name'], ['Engines', 'count', 'engines'], ['Blocks', 'count', 'blocks'], ['Size', 'bytes', 'bytes'],
      ['Hits', 'ratio', rate], ['Namespace', 'text', 'namespace'],
    ], 'no engine has saved a block yet.');
  }

  function update(figures) {
    const { pool, hit_bytes: hit, ssd, cluster, sessions } = figures;
    set.problems(figures.problems);
    // A window in which nothing was looked up is not told.
    set.windows.forEach((show) => show(null, null, 'nothing was looked up'));
    figures.windows.forEach((window) => {
      // Blocks that were saved by others, or before the daemon began to count, are hits at their first lookup.
      const bound = Math.max(window.hit_ratio, window.ceiling);
      set.gauge(window.window)(window.hit_ratio, bound, `of ${format.count(window.blocks)} blocks`);
    });
    set.hits(latest('hit_bytes'));
    const asked = (latest('hit_blocks') || 0) + (latest('missed_blocks') || 0);
    set.lookups(latest('hit_blocks'), `of ${format.perSecond(asked)} looked up`);
    set.ram(hit.ram);
    set.lower(hit.ssd + hit.peers, `SSD ${format.bytes(hit.ssd)}, other hosts ${format.bytes(hit.peers)}`);
    set.used(pool.bytes ? pool.used_bytes / pool.bytes : null, null,
      `${format.bytes(pool.used_bytes)} of ${format.bytes(pool.bytes)}`);
    set.blocks(pool.blocks, `${format.count(pool.leased_blocks)} leased, ${format.count(pool.claimed_blocks)} being saved`);
    set.saves(latest('saved_bytes'), `${format.bytes(pool.saved_bytes)} since the start`);
    set.seals(pool.seal_queue_blocks);
    set.evictions(latest('evicted_bytes'), `by the policy ${pool.policy}`);
    set.residence(recentMean('residence_seconds', 'evicted_blocks'), total('evicted_blocks') ? 'on average' : 'none was evicted');
    set.unsaved(latest('unsaved_blocks'));
    if (ssd && set.ssdUsed) {
      set.ssdUsed(ssd.bytes, `${format.count(ssd.blocks)} blocks; files of ${format.bytes(ssd.capacity_bytes)}`);
      set.ssdReads(latest('ssd_read_bytes'));
      set.ssdWrites(latest('ssd_written_bytes'), `${format.bytes(ssd.backlog_bytes)} under way`);
      const mean = recentMean('ssd_read_ns', 'ssd_reads');
      set.ssdLatency(mean === null ? null : mean / 1e9, mean === null ? 'none was read' : 'on average');
      set.ssdWaiting(ssd.waiting_blocks, `${format.count(ssd.unwritten_blocks)} never came to it`);
    }
    if (cluster && set.members) {
      set.members(`${cluster.members_reached} of ${cluster.members}`,
        cluster.replicas ? `index replicas: ${cluster.replicas_reached} of ${cluster.replicas}` : '');
      set.fetched(latest('peer_bytes'));
      set.lent(latest('lent_bytes'), `${format.bytes(cluster.lent_bytes_now)} now`);
      set.announced(cluster.announced_blocks);
    }
    set.sessions(sessions.worker, `schedulers: ${sessions.scheduler}, tools: ${sessions.tool}, lost: ${sessions.lost}`);
    set.waiting(figures.hand_offs.waiting, `for ${format.count(figures.hand_offs.blocks)} blocks`);
    set.handOffs(latest('hand_offs'));
    if (figures.links.length) {
      set.links()(latest('link_bytes'),
        figures.links.map((link) => `GPU ${link.gpu}: ${format.bytes(link.bytes)}`).join(', '));
    }
    set.models(figures.models);
  }

  show(build, update);
}
