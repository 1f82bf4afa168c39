//! The fabric's engine for Python. Users call `python/kvlane/fabric.py`, which wraps it.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvlane_fabric::{
    Access, Descriptor, Engine, EngineId, EngineOptions, FabricError, Failure, Group, GroupPart, Handle,
    InboxOptions, MemoryKind, Message, Op, Pages, PathStatus, PeerId, Pieces, Place, Priority, Run,
    SendOptions, Staged, Tls, Transfer, Transport, WindowDescriptor, WindowRange,
};
use parking_lot::Mutex;
use pyo3::{
    exceptions::{PyConnectionError, PyKeyError, PyOSError, PyValueError},
    prelude::*,
    types::PyBytes,
};

use crate::gpu::open_gpu;
use crate::own::{Own, forked};

/// How often a waiting call checks for a signal.
const SIGNALS: Duration = Duration::from_millis(100);
const RUN_BYTES: usize = 24;

#[pyclass(name = "FabricEngine", module = "kvlane._core", frozen)]
pub(crate) struct PyEngine(Own<Mutex<Option<Arc<Engine>>>>);

#[pyclass(name = "FabricPeer", module = "kvlane._core", frozen)]
pub(crate) struct PyPeer(PeerId, EngineId);

#[pyclass(name = "FabricTransfer", module = "kvlane._core", frozen)]
pub(crate) struct PyTransfer(Own<Handle>);

#[pyclass(name = "FabricPieces", module = "kvlane._core", frozen)]
pub(crate) struct PyPieces(Pieces);

#[pyclass(name = "FabricGroup", module = "kvlane._core", frozen)]
pub(crate) struct PyGroup(Own<Group>);

/// A transfer's options: a counter and its generation at the peer, milliseconds, whether it is bulk.
type Extras = (Option<(u32, u32)>, Option<f64>, bool);
/// Certificate, key, authority.
pub(crate) type PyTls = (PathBuf, PathBuf, PathBuf);
/// A member's pieces, and a counter with its generation there.
type PyPart<'a> = (PyRef<'a, PyPieces>, Option<(u32, u32)>);
/// Engine id and boot nonce.
type PyId = (u128, u64);
type PyPath = (&'static str, Option<String>, bool, Option<f64>, Option<String>, Option<String>);
/// Number, bytes, whether peers may write it, whether it is a GPU's.
type PyRegion = (u32, u64, bool, bool);
/// Region, offset of page 0, bytes from one page to the next, and the pages as little-endian u32.
type PySide<'a> = (u32, u64, u64, &'a [u8]);

#[pymethods]
impl PyEngine {
    #[new]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments for Python")]
    fn new(
        listen: Vec<String>,
        token: String,
        connections: usize,
        patience_ms: f64,
        transport: &str,
        copy_threads: Option<usize>,
        socket_threads: usize,
        inbox: (usize, usize),
        checksums: bool,
        tls: Option<PyTls>,
    ) -> PyResult<Self> {
        let transport = transport_of(transport)?;
        let tls = tls.map(tls_of);
        let mut options = EngineOptions {
            token,
            connections,
            transport,
            socket_threads,
            checksums,
            tls,
            ..EngineOptions::default()
        };
        options.copy_threads = copy_threads.unwrap_or(options.copy_threads);
        options.listen = listen.iter().map(|address| resolve(address)).collect::<PyResult<_>>()?;
        options.inbox = InboxOptions { messages: inbox.0, bytes: inbox.1 };
        options.transfers.peer_patience = milliseconds(patience_ms)?;
        let engine = Engine::new(options).map_err(error)?;
        Ok(Self(Own::new(Mutex::new(Some(Arc::new(engine))))))
    }

    /// The caller keeps the memory until it is unregistered or the engine is closed.
    fn register(&self, py: Python<'_>, address: usize, length: u64, access: &str) -> PyResult<u32> {
        let access = access_of(access)?;
        let engine = self.engine()?;
        let register = || {
            let memory = std::ptr::with_exposed_provenance_mut(address);
            // SAFETY: kvlane.fabric holds the memory's owner until then.
            unsafe { engine.register(memory, length, access) }
        };
        py.detach(register).map_err(error)
    }

    /// As `register`, of the GPU with this ordinal. OSError where there is no driver, no such GPU, or it refuses.
    fn register_gpu(
        &self,
        py: Python<'_>,
        gpu: u32,
        address: u64,
        length: u64,
        access: &str,
    ) -> PyResult<u32> {
        let access = access_of(access)?;
        let engine = self.engine()?;
        let gpu = open_gpu(gpu)?;
        // SAFETY: kvlane.fabric holds the memory's owner until then.
        py.detach(|| unsafe { engine.register_gpu(&gpu, address, length, access) }).map_err(error)
    }

    /// Bytes copied to GPUs, bytes copied from them, copies that failed.
    fn staged(&self) -> PyResult<(u64, u64, u64)> {
        let Staged { to_gpus, from_gpus, failed } = self.engine()?.staged();
        Ok((to_gpus, from_gpus, failed))
    }

    fn unregister(&self, py: Python<'_>, region: u32) -> PyResult<()> {
        let engine = self.engine()?;
        py.detach(|| engine.unregister(region)).map_err(error)
    }

    /// Opens a window for the engine with this id: region, offset and length of each range. Returns the window's descriptor.
    fn open_window<'py>(
        &self,
        py: Python<'py>,
        peer: PyId,
        ranges: Vec<(u32, u64, u64)>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let range = |(region, offset, len)| WindowRange { region, offset, len };
        let (engine, ranges) = (self.engine()?, ranges.into_iter().map(range).collect());
        let to = EngineId { engine_id: peer.0, boot_nonce: peer.1 };
        let window = py.detach(|| engine.open_window(to, ranges)).map_err(error)?;
        Ok(PyBytes::new(py, &window.to_bytes()))
    }

    fn close_window(&self, py: Python<'_>, window: &[u8]) -> PyResult<()> {
        let (engine, window) = (self.engine()?, parse_window(window)?);
        py.detach(|| engine.close_window(&window)).map_err(error)
    }

    /// Reads through a peer's window; runs as in `begin_runs`. None if the window is closed.
    fn read_window(
        &self,
        peer: &PyPeer,
        window: &[u8],
        local: u32,
        runs: &[u8],
        extras: Extras,
    ) -> PyResult<Option<PyTransfer>> {
        let window = parse_window(window)?;
        let pieces = pieces_of((local, window.number), runs)?;
        let transfer = Transfer { window: Some(window), ..transfer(false, pieces, extras)? };
        match self.engine()?.begin(peer.0, transfer) {
            Ok(handle) => Ok(Some(PyTransfer::new(handle))),
            Err(FabricError::WindowClosed) => Ok(None),
            Err(other) => Err(error(other)),
        }
    }

    fn describe<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = self.engine()?.describe().map_err(error)?.to_bytes();
        Ok(PyBytes::new(py, &bytes.map_err(|error| PyValueError::new_err(error.to_string()))?))
    }

    fn connect(&self, descriptor: &[u8]) -> PyResult<PyPeer> {
        let descriptor = parse(descriptor)?;
        let peer = self.engine()?.connect(&descriptor).map_err(error)?;
        Ok(PyPeer(peer, EngineId::from(&descriptor)))
    }

    /// Connects to a peer by its address, and waits until the peer has announced its regions.
    fn connect_to(&self, py: Python<'_>, address: &str, timeout_ms: f64) -> PyResult<PyPeer> {
        let (engine, address, timeout) = (self.engine()?, resolve(address)?, milliseconds(timeout_ms)?);
        let peer = py.detach(|| engine.connect_to(address, timeout)).map_err(error)?;
        let id = engine.peer_id(peer).ok_or_else(|| error(FabricError::NoSuchPeer))?;
        Ok(PyPeer(peer, id))
    }

    /// The regions that the peer has announced.
    fn regions(&self, peer: &PyPeer) -> PyResult<Vec<PyRegion>> {
        let regions = self.engine()?.regions(peer.0).map_err(error)?;
        let shown = regions.into_iter().map(|region| {
            let is_gpu = region.kind == MemoryKind::Cuda;
            (region.number, region.len, region.access == Access::ReadWrite, is_gpu)
        });
        Ok(shown.collect())
    }

    fn update(&self, peer: &PyPeer, descriptor: &[u8]) -> PyResult<()> {
        self.engine()?.update(peer.0, &parse(descriptor)?).map_err(error)
    }

    fn disconnect(&self, py: Python<'_>, peer: &PyPeer) -> PyResult<()> {
        let engine = self.engine()?;
        py.detach(|| engine.disconnect(peer.0));
        Ok(())
    }

    /// Each path: carrier, address, whether it is up, bytes a second, why it broke the last time, why it has no rings.
    fn paths(&self, peer: &PyPeer) -> PyResult<Vec<PyPath>> {
        let path = |path: PathStatus| {
            let PathStatus { carrier, address, is_up, bytes_per_second, trouble, no_rings } = path;
            let address = address.map(|address| address.to_string());
            (carrier, address, is_up, bytes_per_second, trouble, no_rings)
        };
        Ok(self.engine()?.paths(peer.0).into_iter().map(path).collect())
    }

    fn begin(
        &self,
        peer: &PyPeer,
        is_write: bool,
        pieces: &PyPieces,
        extras: Extras,
    ) -> PyResult<PyTransfer> {
        self.start(peer, is_write, pieces.0.clone(), extras)
    }

    /// As `begin` with `FabricPieces.runs`, without an object for them: `regions` are the one here and the one there.
    fn begin_runs(
        &self,
        peer: &PyPeer,
        is_write: bool,
        regions: (u32, u32),
        runs: &[u8],
        extras: Extras,
    ) -> PyResult<PyTransfer> {
        self.start(peer, is_write, pieces_of(regions, runs)?, extras)
    }

    fn group(&self, peers: Vec<PyRef<'_, PyPeer>>) -> PyResult<PyGroup> {
        let peers: Vec<PeerId> = peers.iter().map(|peer| peer.0).collect();
        self.engine()?.group(&peers).map(|group| PyGroup(Own::new(group))).map_err(error)
    }

    fn send(
        &self,
        py: Python<'_>,
        peer: &PyPeer,
        bytes: &[u8],
        timeout_ms: f64,
        is_bulk: bool,
    ) -> PyResult<PyTransfer> {
        let options = SendOptions { timeout: milliseconds(timeout_ms)?, priority: priority(is_bulk) };
        let engine = self.engine()?;
        py.detach(|| engine.send(peer.0, bytes, options)).map(PyTransfer::new).map_err(error)
    }

    /// Engine id and boot nonce of the sender, and the bytes. None if no message came in this time.
    fn receive<'py>(
        &self,
        py: Python<'py>,
        timeout_ms: Option<f64>,
    ) -> PyResult<Option<(PyId, Bound<'py, PyBytes>)>> {
        let engine = self.engine()?;
        let wait = |timeout| match engine.receive(Some(timeout)) {
            Some(message) => Some(Some(message)),
            None => engine.is_closed().then_some(None),
        };
        match wait_with_signals(py, timeout_ms, wait)? {
            None => Ok(None),
            Some(None) => Err(closed()),
            Some(Some(Message { from, bytes })) => Ok(Some((id(from), PyBytes::new(py, &bytes)))),
        }
    }

    fn id(&self) -> PyResult<PyId> {
        Ok(id(self.engine()?.id()))
    }

    /// Nanoseconds of the processor and on the wall, of each hold of the engine's lock.
    fn take_holds(&self) -> PyResult<Vec<(u64, u64)>> {
        let holds = self.engine()?.take_holds();
        Ok(holds.into_iter().map(|hold| (hold.cpu.as_nanos() as u64, hold.wall.as_nanos() as u64)).collect())
    }

    fn measure_holds(&self) -> PyResult<()> {
        self.engine()?.measure_holds();
        Ok(())
    }

    fn checksum_errors(&self) -> PyResult<u64> {
        Ok(self.engine()?.checksum_errors())
    }

    fn connections_without_rings(&self) -> PyResult<u64> {
        Ok(self.engine()?.connections_without_rings())
    }

    fn open_counter(&self, counter: u32) -> PyResult<u32> {
        Ok(self.engine()?.open_counter(counter))
    }

    fn count(&self, counter: u32, generation: u32) -> PyResult<u64> {
        Ok(self.engine()?.count(counter, generation))
    }

    fn retire_counter(&self, counter: u32, generation: u32) -> PyResult<u32> {
        Ok(self.engine()?.retire_counter(counter, generation))
    }

    fn wait_count(
        &self,
        py: Python<'_>,
        counter: u32,
        generation: u32,
        target: u64,
        timeout_ms: Option<f64>,
    ) -> PyResult<bool> {
        let engine = self.engine()?;
        let wait = |timeout| match engine.wait_count(counter, generation, target, Some(timeout)) {
            true => Some(true),
            false => engine.is_counter_over(counter, generation).then_some(false),
        };
        Ok(wait_with_signals(py, timeout_ms, wait)?.unwrap_or(false))
    }

    fn close(&self, py: Python<'_>) {
        let Some(shared) = self.0.if_here() else { return };
        let engine = shared.lock().clone();
        // Other threads may be in a call. The close frees the memory, not the last reference. A thread that closes at the same
        // time waits too.
        py.detach(|| engine.inspect(|engine| engine.close()));
        py.detach(|| drop(shared.lock().take()));
    }
}

#[pymethods]
impl PyPeer {
    fn id(&self) -> PyId {
        id(self.1)
    }
}

#[pymethods]
impl PyPieces {
    /// `runs`: offset here, offset there, length, each a little-endian u64.
    #[staticmethod]
    fn runs(local: u32, remote: u32, runs: &[u8]) -> PyResult<PyPieces> {
        pieces_of((local, remote), runs).map(PyPieces)
    }

    #[staticmethod]
    fn pages(page_bytes: u64, local: PySide<'_>, remote: PySide<'_>) -> PyPieces {
        let pages = |(region, offset, stride, indices): PySide<'_>| Pages {
            region,
            offset,
            stride,
            indices: indices
                .chunks_exact(4)
                .map(|index| u32::from_le_bytes([index[0], index[1], index[2], index[3]]))
                .collect(),
        };
        PyPieces(Pieces::Paged { page_bytes, local: pages(local), remote: pages(remote) })
    }
}

#[pymethods]
impl PyGroup {
    /// For each member in order: its pieces, and a counter with its generation there. Returns the transfer of each.
    fn scatter(
        &self,
        parts: Vec<PyPart<'_>>,
        timeout_ms: Option<f64>,
        is_bulk: bool,
    ) -> PyResult<Vec<PyTransfer>> {
        let part =
            |(pieces, immediate): &PyPart<'_>| GroupPart { pieces: pieces.0.clone(), immediate: *immediate };
        let parts: Vec<GroupPart> = parts.iter().map(part).collect();
        let timeout = timeout_ms.map(milliseconds).transpose()?;
        let begun = self.0.get()?.scatter(&parts, timeout, priority(is_bulk)).map_err(error)?;
        Ok(begun.into_parts().into_iter().map(PyTransfer::new).collect())
    }

    fn barrier(&self, counters: Vec<(u32, u32)>, timeout_ms: Option<f64>) -> PyResult<Vec<PyTransfer>> {
        let timeout = timeout_ms.map(milliseconds).transpose()?;
        let begun = self.0.get()?.barrier(&counters, timeout).map_err(error)?;
        Ok(begun.into_parts().into_iter().map(PyTransfer::new).collect())
    }
}

#[pymethods]
impl PyTransfer {
    /// None if the transfer is not over in this time. Else an empty text, or the failure.
    fn wait(&self, py: Python<'_>, timeout_ms: Option<f64>) -> PyResult<Option<&'static str>> {
        // A read from a process of this host may be over already. Then this keeps the interpreter.
        let handle = self.0.get()?;
        if let Some(outcome) = handle.outcome() {
            return Ok(Some(name(outcome)));
        }
        let outcome = wait_with_signals(py, timeout_ms, |timeout| handle.wait(Some(timeout)))?;
        Ok(outcome.map(name))
    }

    fn outcome(&self) -> PyResult<Option<&'static str>> {
        Ok(self.0.get()?.outcome().map(name))
    }

    /// Carriers and the bytes that each moved. Empty before the transfer is over.
    fn carried(&self) -> PyResult<Vec<(&'static str, u64)>> {
        Ok(self.0.get()?.carried())
    }

    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        let handle = self.0.get()?;
        py.detach(|| handle.cancel());
        Ok(())
    }
}

impl PyTransfer {
    fn new(handle: Handle) -> PyTransfer {
        PyTransfer(Own::new(handle))
    }
}

impl PyEngine {
    fn engine(&self) -> PyResult<Arc<Engine>> {
        self.0.get()?.lock().clone().ok_or_else(closed)
    }

    fn start(&self, peer: &PyPeer, is_write: bool, pieces: Pieces, extras: Extras) -> PyResult<PyTransfer> {
        let transfer = transfer(is_write, pieces, extras)?;
        // This copies at most a mebibyte. To release the interpreter would cost 5 ms for each thread that computes.
        self.engine()?.begin(peer.0, transfer).map(PyTransfer::new).map_err(error)
    }
}

fn transfer(is_write: bool, pieces: Pieces, extras: Extras) -> PyResult<Transfer> {
    let (immediate, timeout_ms, is_bulk) = extras;
    let timeout = timeout_ms.map(milliseconds).transpose()?;
    let op = if is_write { Op::Write } else { Op::Read };
    Ok(Transfer { op, immediate, timeout, priority: priority(is_bulk), ..Transfer::write(pieces) })
}

/// The access of peers: "write" (and read), "read", or "windows" for nothing but open windows.
fn access_of(name: &str) -> PyResult<Access> {
    match name {
        "write" => Ok(Access::ReadWrite),
        "read" => Ok(Access::Read),
        "windows" => Ok(Access::Windows),
        other => Err(PyValueError::new_err(format!("access '{other}': it is write, read or windows"))),
    }
}

fn parse_window(window: &[u8]) -> PyResult<WindowDescriptor> {
    WindowDescriptor::from_bytes(window).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Runs of a region here and one there: offset here, offset there, length, each a little-endian u64.
fn pieces_of((local, remote): (u32, u32), runs: &[u8]) -> PyResult<Pieces> {
    let (runs, []) = runs.as_chunks::<RUN_BYTES>() else {
        return Err(PyValueError::new_err("a run has 24 bytes"));
    };
    let run = |run: &[u8; RUN_BYTES]| {
        let word = |index: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&run[index * 8..index * 8 + 8]);
            u64::from_le_bytes(word)
        };
        let [local, remote] =
            [(local, 0), (remote, 1)].map(|(region, at)| Place { region, offset: word(at) });
        Run { local, remote, len: word(2) }
    };
    Ok(Pieces::Runs(runs.iter().map(run).collect()))
}

/// Waits in parts, so that a signal is handled meanwhile.
fn wait_with_signals<T: Send>(
    py: Python<'_>,
    timeout_ms: Option<f64>,
    wait: impl Fn(Duration) -> Option<T> + Sync,
) -> PyResult<Option<T>> {
    let timeout = timeout_ms.map(milliseconds).transpose()?;
    let begun = std::time::Instant::now();
    loop {
        let left = timeout.map_or(SIGNALS, |timeout| timeout.saturating_sub(begun.elapsed()));
        let found = py.detach(|| wait(left.min(SIGNALS)));
        if found.is_some() || left.is_zero() {
            return Ok(found);
        }
        py.check_signals()?;
    }
}

fn closed() -> PyErr {
    PyValueError::new_err("the engine is closed")
}

fn id(id: EngineId) -> PyId {
    (id.engine_id, id.boot_nonce)
}

fn priority(is_bulk: bool) -> Priority {
    if is_bulk { Priority::Bulk } else { Priority::High }
}

fn name(outcome: Result<(), Failure>) -> &'static str {
    match outcome {
        Ok(()) => "",
        Err(Failure::Cancelled) => "cancelled",
        Err(Failure::DeadlineExceeded) => "deadline",
        Err(Failure::Refused) => "refused",
        Err(Failure::PeerLost) => "lost",
        Err(Failure::PathsBreak) => "breaks",
        Err(Failure::NoRoom) => "room",
        Err(Failure::Gpu) => "gpu",
    }
}

fn parse(descriptor: &[u8]) -> PyResult<Descriptor> {
    Descriptor::from_bytes(descriptor).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// The files of TLS as the fabric takes them.
pub(crate) fn tls_of((certificate, key, authority): PyTls) -> Tls {
    Tls { certificate, key, authority }
}

pub(crate) fn transport_of(name: &str) -> PyResult<Option<Transport>> {
    match name {
        "auto" => Ok(None),
        "tcp" => Ok(Some(Transport::TCP)),
        "cma" => Ok(Some(Transport::CMA)),
        "cuda" => Ok(Some(Transport::CUDA)),
        other => Err(PyValueError::new_err(format!("transport '{other}': it is auto, tcp, cma or cuda"))),
    }
}

/// A name resolves to its first address.
pub(crate) fn resolve(address: &str) -> PyResult<SocketAddr> {
    let resolved = address.to_socket_addrs().map_err(|error| error.to_string());
    let first = resolved.and_then(|mut all| all.next().ok_or_else(|| "it has no address".into()));
    first.map_err(|why| PyValueError::new_err(format!("'{address}' is no HOST:PORT: {why}")))
}

fn milliseconds(value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value / 1e3)
        .map_err(|_| PyValueError::new_err(format!("{value} ms is no span of time")))
}

pub(crate) fn error(error: FabricError) -> PyErr {
    let sentence = error.to_string();
    let kind = match &error {
        FabricError::Member { why, .. } => why,
        kind => kind,
    };
    match kind {
        FabricError::Forked(why) => forked(*why),
        FabricError::Io(_) | FabricError::Gpu(_) | FabricError::Register(_) => PyOSError::new_err(sentence),
        FabricError::NotReached { .. } => PyConnectionError::new_err(sentence),
        FabricError::NoSuchPeer | FabricError::NoSuchRegion(_) | FabricError::NoSuchWindow(_) => {
            PyKeyError::new_err(sentence)
        }
        _ => PyValueError::new_err(sentence),
    }
}
