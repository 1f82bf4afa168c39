//! Both halves of direct hand-offs between engines: a rank's and a scheduler's.

use std::net::IpAddr;
use std::time::Duration;

use kvlane_fabric::{Access, Engine, EngineOptions, Options, Transport};
use kvlane_gpu::Gpu;
use kvlane_handoff::{
    AgentError, Area, Filled, HandoffId, LandingOptions, LandingStatus, LayerOrder, LendingOptions, Outcome,
    RankAddress, RankAgent, RankOptions, ReadCounts, SchedulerAgent, SchedulerOptions, Wanted,
};
use parking_lot::{MappedRwLockReadGuard, Mutex, RwLock, RwLockReadGuard};
use pyo3::{exceptions::PyValueError, prelude::*, types::PyBytes};

use crate::convert::{PyRegion, bytes16, milliseconds, region, value_error};
use crate::fabric::{PyTls, error, resolve, tls_of, transport_of};
use crate::gpu::{driver, engine_stream, failed};
use crate::own::Own;

/// The fabric closes a connection that brings no answer for this time.
const POST_PATIENCE: Duration = Duration::from_secs(12);

/// Blocks that a step fills: the hand-off, the first one's index in the prompt, their ids, the last one's hash.
type PyFilled = (Vec<u8>, u32, Vec<u32>, Option<Vec<u8>>);

/// A rank's agent. `close` takes it exclusively; the other calls share it.
#[pyclass(name = "HandoffRank", module = "kvlane._core", frozen)]
pub(crate) struct PyHandoffRank(Own<RwLock<Option<RankAgent>>>);

#[pymethods]
impl PyHandoffRank {
    /// The memory of all areas stays until `close`. `gpu`: the UUID of the GPU whose memory it is.
    #[new]
    #[pyo3(signature = (listen, token, regions, areas, key, transport, gpu = None, tls = None))]
    #[allow(clippy::too_many_arguments, reason = "arguments for Python")]
    fn new(
        py: Python<'_>,
        listen: &str,
        token: String,
        regions: Vec<PyRegion>,
        areas: Vec<(u64, u64)>,
        key: &[u8],
        transport: &str,
        gpu: Option<Vec<u8>>,
        tls: Option<PyTls>,
    ) -> PyResult<Self> {
        let key = bytes16("a key", key)?;
        let engine = engine(listen, token, transport_of(transport)?, tls)?;
        let gpu = gpu.map(|uuid| bytes16("a GPU's UUID", &uuid)).transpose()?;
        let gpu = gpu.map(|uuid| Gpu::open_uuid(driver()?, uuid).map_err(failed)).transpose()?;
        let register = |(base, bytes): (u64, u64)| {
            let registered = match &gpu {
                // SAFETY: `_core.pyi` asks the caller to keep it until `close`.
                Some(gpu) => unsafe { engine.register_gpu(gpu, base, bytes, Access::Windows) },
                None => {
                    let memory = std::ptr::with_exposed_provenance_mut(base as usize);
                    // SAFETY: as for a GPU's.
                    unsafe { engine.register(memory, bytes, Access::Windows) }
                }
            };
            Ok(Area { region: registered.map_err(error)?, base, bytes })
        };
        let areas = py.detach(|| areas.into_iter().map(register).collect::<PyResult<_>>())?;
        let options = RankOptions { regions: regions.into_iter().map(region).collect(), areas, gpu, key };
        let agent = RankAgent::start(engine, options).map_err(agent_error)?;
        Ok(Self(Own::new(RwLock::new(Some(agent)))))
    }

    #[getter]
    fn endpoint<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, here(self.0.get()?)?.endpoint()))
    }

    fn step_begins(&self, filled: Vec<PyFilled>) -> PyResult<()> {
        let filled = filled.into_iter().map(|(id, first_block, blocks, hash)| {
            let hash = hash.map(|hash| bytes16("a hash", &hash)).transpose()?;
            Ok(Filled { id: handoff_id(&id)?, first_block, blocks, hash })
        });
        here(self.0.get()?)?.step_begins(filled.collect::<PyResult<_>>()?);
        Ok(())
    }

    /// The hook that vLLM calls after each layer. `layers`: names with the last region that each writes.
    fn layer_hook(slf: Py<Self>, layers: Vec<(String, u32)>) -> PyLayerHook {
        PyLayerHook { rank: slf, step: Mutex::new(LayersOfStep::new(layers)) }
    }

    #[pyo3(signature = (stream = 0))]
    fn step_ends(&self, stream: u64) -> PyResult<()> {
        here(self.0.get()?)?.step_ends(&engine_stream(stream)).map_err(failed)
    }

    /// Since the last call: reads, failed ones, runs, bytes by cuda, by cma, and by TCP.
    fn take_counts(&self) -> PyResult<(u64, u64, u64, u64, u64, u64)> {
        let counts = here(self.0.get()?)?.take_counts();
        let ReadCounts { reads, failed, runs, cuda_bytes, cma_bytes, tcp_bytes } = counts;
        Ok((reads, failed, runs, cuda_bytes, cma_bytes, tcp_bytes))
    }

    fn close(&self, py: Python<'_>) {
        if let Some(agent) = self.0.if_here() {
            py.detach(|| drop(agent.write().take()));
        }
    }
}

impl PyHandoffRank {
    fn layers_computed(&self, regions: u32, stream: u64) -> PyResult<()> {
        here(self.0.get()?)?.layers_computed(regions, &engine_stream(stream)).map_err(failed)
    }
}

/// A layer's hook. vLLM calls it within the forward pass, so it is short and raises nothing.
#[pyclass(name = "LayerHook", module = "kvlane._core", frozen)]
pub(crate) struct PyLayerHook {
    rank: Py<PyHandoffRank>,
    step: Mutex<LayersOfStep>,
}

#[pymethods]
impl PyLayerHook {
    fn begin(&self, stream: u64) {
        self.step.lock().begin(stream);
    }

    fn __call__(&self, layer: &str) {
        let mut step = self.step.lock();
        let Some(regions) = step.layers.computed(layer) else { return };
        let reported = self.rank.get().layers_computed(regions, step.stream);
        if let Err(why) = reported {
            step.failed.get_or_insert(why);
        }
    }

    /// Raises the first error since the last call.
    fn check(&self) -> PyResult<()> {
        self.step.lock().failed.take().map_or(Ok(()), Err)
    }
}

struct LayersOfStep {
    layers: LayerOrder,
    stream: u64,
    failed: Option<PyErr>,
}

impl LayersOfStep {
    fn new(layers: Vec<(String, u32)>) -> LayersOfStep {
        LayersOfStep { layers: LayerOrder::new(layers), stream: 0, failed: None }
    }

    fn begin(&mut self, stream: u64) {
        self.layers.begin();
        self.stream = stream;
    }
}

/// A scheduler's agent. `close` takes it exclusively; the other calls share it.
#[pyclass(name = "HandoffScheduler", module = "kvlane._core", frozen)]
pub(crate) struct PyHandoffScheduler {
    agent: Own<RwLock<Option<SchedulerAgent>>>,
    address: String,
}

/// A word for the end, a sentence, the block before which all have landed, and hashes with their blocks.
type PyStanding = (Option<&'static str>, String, u32, Vec<(u32, Vec<u8>)>);

#[pymethods]
impl PyHandoffScheduler {
    #[new]
    #[pyo3(signature = (listen, token, ranks, shape, networks, tls = None))]
    fn new(
        listen: &str,
        token: String,
        ranks: Vec<(Vec<u8>, Vec<u8>)>,
        shape: &[u8],
        networks: Vec<(IpAddr, u8)>,
        tls: Option<PyTls>,
    ) -> PyResult<Self> {
        // Messages alone, which need no transport for bytes.
        // Ranks move the bytes.
        let engine = engine(listen, token, Some(Transport::NONE), tls)?;
        let own = engine.describe().map_err(error)?;
        let address = own.socket_addresses().next().map(|address| address.to_string()).unwrap_or_default();
        let of_rank =
            |(endpoint, key): (Vec<u8>, Vec<u8>)| Ok(RankAddress { endpoint, key: bytes16("a key", &key)? });
        let options = SchedulerOptions {
            ranks: ranks.into_iter().map(of_rank).collect::<PyResult<_>>()?,
            shape: bytes16("a shape", shape)?,
            networks,
            lendings: LendingOptions::default(),
            landings: LandingOptions::default(),
        };
        let agent = SchedulerAgent::start(engine, options).map_err(agent_error)?;
        Ok(Self { agent: Own::new(RwLock::new(Some(agent))), address })
    }

    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    fn begin_lending(&self, id: &[u8], content: &[u8]) -> PyResult<bool> {
        Ok(self.agent()?.begin_lending(handoff_id(id)?, bytes16("a content", content)?))
    }

    fn hold_lending(&self, id: &[u8]) -> PyResult<()> {
        self.agent()?.hold_lending(handoff_id(id)?);
        Ok(())
    }

    fn release_lending(&self, id: &[u8]) -> PyResult<()> {
        self.agent()?.release_lending(handoff_id(id)?);
        Ok(())
    }

    fn lending_progress(&self, id: &[u8], ahead: u32, computed: u64) -> PyResult<bool> {
        Ok(self.agent()?.lending_progress(handoff_id(id)?, ahead, computed))
    }

    fn give_up_lending(&self, id: &[u8]) -> PyResult<()> {
        self.agent()?.give_up_lending(handoff_id(id)?);
        Ok(())
    }

    fn end_oldest_unwanted_lending(&self, but: &[u8]) -> PyResult<Option<Vec<u8>>> {
        Ok(self.agent()?.end_oldest_unwanted_lending(handoff_id(but)?).map(|id| id.0.to_vec()))
    }

    fn take_free_lendings(&self) -> PyResult<Vec<Vec<u8>>> {
        Ok(self.agent()?.take_free_lendings().into_iter().map(|id| id.0.to_vec()).collect())
    }

    #[allow(clippy::too_many_arguments, reason = "arguments for Python")]
    fn begin_landing(
        &self,
        id: &[u8],
        address: &str,
        content: &[u8],
        first_block: u32,
        end_block: u32,
        patience_ms: f64,
        budget_ms: f64,
    ) -> PyResult<bool> {
        let wanted = Wanted {
            address: resolve(address)?,
            content: bytes16("a content", content)?,
            first_block,
            end_block,
            patience: milliseconds(patience_ms)?,
            budget: milliseconds(budget_ms)?,
        };
        Ok(self.agent()?.begin_landing(handoff_id(id)?, wanted))
    }

    fn give_room(&self, id: &[u8], blocks: Vec<u32>) -> PyResult<()> {
        self.agent()?.give_room(handoff_id(id)?, &blocks);
        Ok(())
    }

    fn postpone_landing(&self, id: &[u8], budget_ms: f64, waits_for_room: bool) -> PyResult<()> {
        self.agent()?.postpone_landing(handoff_id(id)?, milliseconds(budget_ms)?, waits_for_room);
        Ok(())
    }

    fn live_landings(&self) -> PyResult<Vec<Vec<u8>>> {
        Ok(self.agent()?.live_landings().into_iter().map(|id| id.0.to_vec()).collect())
    }

    /// None if there is no such landing.
    fn standing(&self, id: &[u8]) -> PyResult<Option<PyStanding>> {
        let status = self.agent()?.landing_status(handoff_id(id)?);
        Ok(status.map(|LandingStatus { outcome, end_block, hashes }| {
            let sentence = outcome.as_ref().map(ToString::to_string).unwrap_or_default();
            let hashes = hashes.into_iter().map(|(block, hash)| (block, hash.to_vec())).collect();
            (outcome.as_ref().map(word), sentence, end_block, hashes)
        }))
    }

    fn give_landing_up(&self, id: &[u8]) -> PyResult<()> {
        self.agent()?.give_up_landing(handoff_id(id)?);
        Ok(())
    }

    /// ValueError if it is not over.
    fn forget_landing(&self, id: &[u8]) -> PyResult<()> {
        let (agent, id) = (self.agent()?, handoff_id(id)?);
        if agent.landing_status(id).is_some_and(|status| status.outcome.is_none()) {
            return Err(PyValueError::new_err("a landing that is not over may still be written"));
        }
        agent.forget_landing(id);
        Ok(())
    }

    fn wait_over(&self, py: Python<'_>, id: &[u8], timeout_ms: f64) -> PyResult<bool> {
        let (agent, id, timeout) = (self.agent()?, handoff_id(id)?, milliseconds(timeout_ms)?);
        Ok(py.detach(|| agent.wait_over(id, timeout)))
    }

    fn wait_for_end(&self, py: Python<'_>, timeout_ms: f64) -> PyResult<bool> {
        let (agent, timeout) = (self.agent()?, milliseconds(timeout_ms)?);
        Ok(py.detach(|| agent.wait_for_end(timeout)))
    }

    fn end_all(&self, py: Python<'_>, timeout_ms: f64) -> PyResult<bool> {
        let (agent, timeout) = (self.agent()?, milliseconds(timeout_ms)?);
        Ok(py.detach(|| agent.end_all(timeout)))
    }

    fn close(&self, py: Python<'_>) {
        if let Some(agent) = self.agent.if_here() {
            py.detach(|| drop(agent.write().take()));
        }
    }
}

impl PyHandoffScheduler {
    fn agent(&self) -> PyResult<MappedRwLockReadGuard<'_, SchedulerAgent>> {
        here(self.agent.get()?)
    }
}

/// ValueError once it is closed.
fn here<T>(agent: &RwLock<Option<T>>) -> PyResult<MappedRwLockReadGuard<'_, T>> {
    RwLockReadGuard::try_map(agent.read(), Option::as_ref)
        .map_err(|_| PyValueError::new_err("this part of hand-offs is closed"))
}

fn engine(listen: &str, token: String, transport: Option<Transport>, tls: Option<PyTls>) -> PyResult<Engine> {
    let listen = vec![resolve(listen)?];
    // As long as the fabric waits for a silent peer.
    let transfers = Options { post_patience: POST_PATIENCE, ..Options::default() };
    let tls = tls.map(tls_of);
    let options = EngineOptions { listen, token, transport, tls, transfers, ..EngineOptions::default() };
    Engine::new(options).map_err(error)
}

fn handoff_id(bytes: &[u8]) -> PyResult<HandoffId> {
    bytes16("a hand-off's id", bytes).map(HandoffId)
}

/// The outcome's name in metrics.
fn word(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Landed => "landed",
        Outcome::Refused(_) => "refused",
        Outcome::Unreachable(_) => "unreachable",
        Outcome::Unheard => "unheard",
        Outcome::Stalled => "stalled",
        Outcome::TooLong => "too_long",
        Outcome::OverBudget => "budget",
        Outcome::PeerLost => "peer_lost",
        Outcome::GivenUp => "given_up",
    }
}

fn agent_error(why: AgentError) -> PyErr {
    match why {
        AgentError::Fabric(why) => error(why),
        AgentError::Io(why) => why.into(),
        AgentError::Gpu(why) => failed(why),
        other => value_error(other),
    }
}
