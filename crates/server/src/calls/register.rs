//! OpenEngine, ShareChunks, RegisterWorker, MapPool and PoolMapped: an engine opens its groups, and its workers register
//! their memory and map the pool.
//!
//! A worker's blocks travel in one of three ways. On a GPU the daemon's driver copies them. Else the worker loads from its
//! mapping of the pool. Its saves are read by the daemon with process_vm, or written by the worker through that mapping.

use std::{collections::HashMap, os::fd::OwnedFd, sync::Arc};

use kvlane_block::{LayoutDigest, Namespace, Rank, Region, ShardLayout, shard_bytes};
use kvlane_engine_memory::{GpuMemory, Pace, PeerBlocks, ProcessVm, SharedChunks};
use kvlane_proto::{
    shard_layout::decode_shard_layout,
    v1::{self, hello::Role, register_worker::Method, reply::Body as Answer},
};

use super::{
    context::{Answered, Context, done},
    save::copy_out,
    save_thread::SaveThread,
};
use crate::{
    descriptions::Shard,
    engines::{GroupSpec, WorkerGroup},
    greeted::{Registered, WorkerState},
    metrics::events::method_name,
    peer::Peer,
    refusal::Refusal,
    wire_gpu,
};

/// Opens the groups of a scheduler's engine.
pub(crate) fn open_engine(context: &mut Context<'_>, open: &v1::OpenEngine) -> Result<Answer, Refusal> {
    let (shared, greeted) = (context.shared, &mut *context.greeted);
    // Cleared first: if this fails, the engine may end, and its owner with it.
    greeted.opened = None;
    let groups = open
        .groups
        .iter()
        .map(|group| {
            Ok(GroupSpec {
                namespace: Namespace::from_bytes(&group.namespace).map_err(Refusal::invalid)?,
                name: group.name.chars().take(256).collect(),
                tokens_per_block: group.tokens_per_block,
                window_blocks: group.window_blocks,
                crosses_hosts: group.crosses_hosts,
            })
        })
        .collect::<Result<Vec<_>, Refusal>>()?;
    let (owner, ready) = shared
        .engines
        .open(&greeted.info.engine_id, greeted.id, open.workers, groups, open.cancelled_below, &shared.store)
        .map_err(Refusal::conflict)?;
    greeted.opened = Some(owner);
    Ok(Answer::EngineOpened(v1::EngineOpened { ready }))
}

/// Takes descriptors of GPU memory that the worker is about to register.
pub(crate) fn share_chunks(context: &mut Context<'_>, share: &v1::ShareChunks) -> Result<Answer, Refusal> {
    let descriptors = std::mem::take(&mut context.descriptors);
    let (shared, greeted) = (context.shared, &mut *context.greeted);
    let gpus = shared.gpus.as_ref().ok_or_else(no_gpu)?;
    let shared =
        wire_gpu::chunk_share(share).and_then(|share| greeted.chunks.push(gpus, &share, descriptors));
    shared.map_err(|error| {
        // A range of which a part is missing cannot be used.
        greeted.chunks = SharedChunks::default();
        Refusal::invalid(format!("the worker's GPU memory cannot be used: {error}"))
    })?;
    Ok(done())
}

fn no_gpu() -> Refusal {
    Refusal::not_allowed("the worker's blocks lie on a GPU, and this daemon has none")
}

/// Registers a worker: its groups, where its blocks lie, and how the daemon reaches them.
pub(crate) fn register_worker(
    context: &mut Context<'_>,
    mut register: v1::RegisterWorker,
) -> Result<Answer, Refusal> {
    let shared = context.shared;
    let greeted = &mut *context.greeted;
    if greeted.worker.as_ref().is_some_and(|worker| !worker.granted.is_empty()) {
        return Err(Refusal::invalid("claims of this worker are open: commit them before it registers anew"));
    }
    // Cleared first: if this fails, the engine may end, and another one with other groups may open under its name. The
    // former registration must not be used with those.
    greeted.worker = None;
    let chunks = std::mem::take(&mut greeted.chunks);
    let (rank, workers) = (Rank(register.rank), register.workers);
    let groups = worker_groups(std::mem::take(&mut register.groups), rank, workers, shared.arena.bytes())?;
    let regions: Vec<Vec<Region>> = groups.iter().map(|group| group.regions.clone()).collect();
    let slices: Vec<Vec<Vec<Region>>> = groups.iter().map(|group| group.slices.clone()).collect();
    let (memory, reason) = open_memory(context, &register, chunks, &slices)?;
    let greeted = &*context.greeted;
    let owner = shared
        .engines
        .register(&greeted.info.engine_id, greeted.id, rank, workers, groups, &shared.store)
        .map_err(Refusal::conflict)?;
    let method = match &memory {
        Some(PeerBlocks::Gpu(_)) => Method::Gpu,
        Some(PeerBlocks::ProcessVm(_)) => Method::ProcessVm,
        None => Method::Mapped,
    };
    note_registered(context, rank, method, &reason);
    let registered = Arc::new(Registered { owner, rank, regions, slices, memory });
    let saves = (method == Method::Gpu).then(|| start_saves(context, &registered)).transpose()?;
    context.greeted.worker = Some(WorkerState { registered, saves, granted: HashMap::new(), next_claim: 0 });
    Ok(Answer::WorkerRegistered(v1::WorkerRegistered { method: method.into(), reason }))
}

/// Parses the groups of a worker. A block of each has to fit into the pool.
fn worker_groups(
    groups: Vec<v1::WorkerGroup>,
    rank: Rank,
    workers: u32,
    pool_bytes: u64,
) -> Result<Vec<WorkerGroup>, Refusal> {
    let group = |group| worker_group(group, rank, workers);
    let groups = groups.into_iter().map(group).collect::<Result<Vec<_>, Refusal>>()?;
    if let Some(bytes) = groups.iter().map(|g| shard_bytes(&g.regions)).find(|bytes| *bytes > pool_bytes) {
        return Err(Refusal::invalid(format!(
            "a block of {bytes} bytes does not fit into the pool of {pool_bytes} bytes"
        )));
    }
    Ok(groups)
}

/// Opens the worker's memory for the daemon's copies. None if the worker copies by itself. The text says why it is so.
fn open_memory(
    context: &Context<'_>,
    register: &v1::RegisterWorker,
    chunks: SharedChunks,
    slices: &[Vec<Vec<Region>>],
) -> Result<(Option<PeerBlocks>, String), Refusal> {
    let method = register.method();
    match context.peer {
        Peer::Local { pidfd, .. } if register.gpu.is_some() || method == Method::Gpu => {
            let memory = import_gpu_memory(context, register, chunks, slices, pidfd)?;
            Ok((Some(PeerBlocks::Gpu(Arc::new(memory))), "the GPU copies".to_owned()))
        }
        _ if method == Method::Mapped => Ok((None, "the worker asked for it".to_owned())),
        Peer::Local { credentials, pidfd } => {
            let pidfd = pidfd.try_clone().map_err(Refusal::no_descriptor)?;
            match ProcessVm::probe(credentials.pid, pidfd, register.fence_address, context.greeted.nonce) {
                Ok(memory) => Ok((Some(PeerBlocks::ProcessVm(memory)), "process_vm works".to_owned())),
                Err(error) if method == Method::ProcessVm => {
                    Err(Refusal::not_allowed(format!("process_vm was asked for, but {error}")))
                }
                Err(error) => Ok((None, error.to_string())),
            }
        }
        Peer::Remote => Err(Refusal::not_allowed("workers connect over the Unix socket")),
    }
}

/// Imports the GPU memory that a worker has exported, for the daemon's own driver.
fn import_gpu_memory(
    context: &Context<'_>,
    register: &v1::RegisterWorker,
    chunks: SharedChunks,
    slices: &[Vec<Vec<Region>>],
    pidfd: &OwnedFd,
) -> Result<GpuMemory, Refusal> {
    let gpus = context.shared.gpus.as_ref().ok_or_else(no_gpu)?;
    let gpu = register.gpu.as_ref().ok_or_else(|| Refusal::invalid("method GPU needs the worker's GPU"))?;
    let pidfd = pidfd.try_clone().map_err(Refusal::no_descriptor)?;
    let regions: Vec<&Region> = slices.iter().flatten().flatten().collect();
    let (engine, nonce) = (&context.greeted.info.engine_id, context.greeted.nonce);
    wire_gpu::exported(gpu)
        .and_then(|gpu| GpuMemory::import(gpus, engine, &gpu, chunks, &regions, nonce, pidfd))
        .map_err(|error| Refusal::invalid(format!("the worker's GPU memory cannot be used: {error}")))
}

/// Reports a registration to the log, the status page and the metrics.
fn note_registered(context: &Context<'_>, rank: Rank, method: Method, reason: &str) {
    let Context { shared, greeted, .. } = context;
    let name = method_name(method);
    // Log: a worker may save and load; method says how its blocks are copied, and reason why.
    tracing::info!(
        session = greeted.id,
        engine = greeted.info.engine_id,
        rank = rank.0,
        method = name,
        reason,
        "worker registered"
    );
    shared.sessions.set_method(greeted.id, name, reason);
    shared.metrics.worker_registered(method);
}

/// Starts the thread that carries out the saves of a worker on a GPU.
fn start_saves(context: &Context<'_>, registered: &Arc<Registered>) -> Result<SaveThread, Refusal> {
    let (shared, greeted) = (context.shared, &*context.greeted);
    let (engine, worker) = (greeted.info.engine_id.clone(), Arc::clone(registered));
    let (id, of_daemon, of_engine) = (greeted.id, Arc::clone(shared), engine.clone());
    let save =
        move |asked: &v1::Save, pace: &Pace<'_>| copy_out(&of_daemon, id, &engine, &worker, asked, pace);
    SaveThread::start(Arc::clone(shared), Arc::clone(context.replies), of_engine, save)
        .map_err(|error| Refusal::limit(format!("no thread for the worker's saves: {error}")))
}

fn worker_group(group: v1::WorkerGroup, rank: Rank, workers: u32) -> Result<WorkerGroup, Refusal> {
    let layout: [u8; 16] = group.layout.as_ref().try_into().map_err(|_| {
        Refusal::invalid(format!("a layout digest has 16 bytes, this one {}", group.layout.len()))
    })?;
    let regions = valid_regions(group.regions)?;
    let slices = group.slices.into_iter().map(|slice| valid_regions(slice.regions));
    let mut slices = slices.collect::<Result<Vec<_>, Refusal>>()?;
    match slices.len() {
        0 => slices.push(regions.clone()),
        count if !(workers as usize).is_multiple_of(count) => {
            return Err(Refusal::invalid(format!("{workers} workers cannot share blocks of {count} slices")));
        }
        count if slices[rank.slice_of(count)] != regions => {
            return Err(Refusal::invalid(format!(
                "the shard of rank {rank} is none of the {count} slices in its place"
            )));
        }
        _ => {}
    }
    let described = shard_layout(&group.described, rank, &slices)?;
    Ok(WorkerGroup {
        namespace: Namespace::from_bytes(&group.namespace).map_err(Refusal::invalid)?,
        shard: Shard { digest: LayoutDigest(layout), layout: described },
        regions,
        slices,
    })
}

/// Parses a worker's description of its shard; None if it has none. It has to be of that rank, and of as many bytes as the
/// slices.
fn shard_layout(
    described: &[u8],
    rank: Rank,
    slices: &[Vec<Region>],
) -> Result<Option<Arc<ShardLayout>>, Refusal> {
    if described.is_empty() {
        return Ok(None);
    }
    let layout = decode_shard_layout(described).map_err(Refusal::invalid)?;
    let (place, holders) = (layout.place, slices.len());
    if place.holders as usize != holders || place.index != rank.0 / place.holders {
        return Err(Refusal::invalid(format!(
            "rank {rank}, whose blocks {holders} rank(s) hold, describes shard {} of {} rank(s)",
            place.index, place.holders
        )));
    }
    let bytes = slices.iter().fold(0, |sum: u64, slice| sum.saturating_add(shard_bytes(slice)));
    if layout.block_bytes() != bytes {
        return Err(Refusal::invalid(format!(
            "rank {rank} describes {} bytes of a block, and its regions have {bytes}",
            layout.block_bytes()
        )));
    }
    Ok(Some(Arc::new(layout)))
}

fn valid_regions(regions: Vec<v1::Region>) -> Result<Vec<Region>, Refusal> {
    if regions.is_empty() {
        return Err(Refusal::invalid("a group or slice without regions has nothing to keep"));
    }
    let region = |region: v1::Region| {
        let region = Region {
            base: region.base,
            block_stride: region.block_stride,
            blocks: region.blocks,
            piece_bytes: region.piece_bytes,
            piece_offsets: region.piece_offsets,
        };
        region.validate().map_err(Refusal::invalid)?;
        Ok(region)
    };
    regions.into_iter().map(region).collect()
}

/// Sends a descriptor of the pool. It is writable only for tools and for workers that save by mapping.
pub(crate) fn map_pool(context: &Context<'_>, map: &v1::MapPool) -> Result<Answered, Refusal> {
    let (greeted, arena) = (&*context.greeted, &context.shared.arena);
    let writer = greeted.info.role == Role::Tool
        || greeted.worker.as_ref().is_some_and(|worker| worker.registered.memory.is_none());
    if map.writable && !writer {
        return Err(Refusal::not_allowed("only workers that save by mapping may write the pool"));
    }
    let fd = arena.descriptor(map.writable);
    let fd = fd.map_err(|error| Refusal::limit(format!("no descriptor of the pool: {error}")))?;
    let page_size = arena.page_size().into();
    let answer = Answer::PoolDescriptor(v1::PoolDescriptor { bytes: arena.bytes(), page_size });
    Ok(Answered::Now(answer, Some(fd)))
}

/// A worker has mapped the pool. Once all of an engine's have, its lookups may promise blocks.
pub(crate) fn pool_mapped(context: &Context<'_>) -> Result<Answer, Refusal> {
    context.shared.engines.mapped(&context.greeted.info.engine_id, context.greeted.id);
    Ok(done())
}

#[cfg(test)]
mod tests {
    use kvlane_proto::{Message, v1::refused::Reason};

    use super::*;

    #[test]
    fn slices_that_cannot_be_those_of_the_workers_are_refused() {
        let slice = |bytes| {
            let region = v1::Region {
                base: 4096,
                block_stride: 8192,
                blocks: 4,
                piece_bytes: bytes,
                piece_offsets: vec![0],
            };
            v1::Slice { regions: vec![region] }
        };
        let group = |own: u64, slices: &[u64]| v1::WorkerGroup {
            namespace: vec![1; 16].into(),
            layout: vec![2; 16].into(),
            regions: slice(own).regions,
            slices: slices.iter().map(|bytes| slice(*bytes)).collect(),
            ..Default::default()
        };
        let shared = worker_group(group(2048, &[4096, 2048]), Rank(3), 4).unwrap();
        assert_eq!(shared.slices.len(), 2);
        assert_eq!(worker_group(group(2048, &[]), Rank(3), 4).unwrap().slices, [shared.regions]);
        let cases = [
            (group(2048, &[4096, 2048]), 1, 3, "3 workers cannot share blocks of 2 slices"),
            (group(2048, &[4096, 2048]), 2, 4, "rank 2 is none of the 2 slices"),
            (group(2048, &[0, 2048]), 1, 2, "piece size is 0"),
            (
                v1::WorkerGroup { slices: vec![v1::Slice::default(); 2], ..group(2048, &[]) },
                1,
                2,
                "without regions",
            ),
        ];
        for (group, rank, workers, sentence) in cases {
            let Refusal { reason, sentence: found } = worker_group(group, Rank(rank), workers).unwrap_err();
            assert!(reason == Reason::Invalid && found.contains(sentence), "{found}");
        }
    }

    #[test]
    fn a_described_shard_has_to_be_the_one_that_is_registered() {
        let message = |index, holders, size| {
            let layer = v1::LayerLayout {
                name: "l.0".into(),
                dtype: "torch.uint8".into(),
                element_bytes: 1,
                dimensions: vec![v1::Dimension { size, ..Default::default() }],
                ..Default::default()
            };
            let layers = vec![layer];
            v1::ShardLayout { index, holders, tensor_parallel: 4, pipeline_parallel: 1, layers }
                .encode_to_vec()
        };
        let region = |bytes| Region {
            base: 4096,
            block_stride: 8192,
            blocks: 4,
            piece_bytes: bytes,
            piece_offsets: vec![0],
        };
        let (alone, both) = (vec![vec![region(4096)]], vec![vec![region(4096)], vec![region(2048)]]);
        assert_eq!(shard_layout(&[], Rank(3), &alone), Ok(None));
        assert!(shard_layout(&message(3, 1, 4096), Rank(3), &alone).unwrap().is_some());
        assert!(shard_layout(&message(1, 2, 6144), Rank(3), &both).unwrap().is_some());
        let cases = [
            (
                message(2, 1, 4096),
                &alone,
                "rank 3, whose blocks 1 rank(s) hold, describes shard 2 of 1 rank(s)",
            ),
            (
                message(1, 2, 4096),
                &alone,
                "rank 3, whose blocks 1 rank(s) hold, describes shard 1 of 2 rank(s)",
            ),
            (
                message(0, 2, 6144),
                &both,
                "rank 3, whose blocks 2 rank(s) hold, describes shard 0 of 2 rank(s)",
            ),
            (
                message(3, 1, 4095),
                &alone,
                "rank 3 describes 4095 bytes of a block, and its regions have 4096",
            ),
            (message(3, 1, 0), &alone, "a dimension's size of a described shard is 0"),
            (vec![0xff; 9], &alone, "cannot be read"),
        ];
        for (described, slices, sentence) in cases {
            let refusal = shard_layout(&described, Rank(3), slices).unwrap_err();
            assert!(refusal.reason == Reason::Invalid && refusal.sentence.contains(sentence), "{refusal}");
        }
    }
}
