//! One rank's connection, mapping and mover thread.

use std::{collections::HashMap, sync::Arc};

use kvlane_block::{BlockHash, BlockId, Rank};
use kvlane_client::{
    Finished, JobKind, LoadGroup, OwnBlocks, Promises, Release, ReleaseAhead, SaveGroupSpec, SaveMethod,
    Worker, WorkerGpu, WorkerGroupSpec, WorkerOptions,
};
use kvlane_memory::PoolPage;
use kvlane_proto::packed::Pages;
use parking_lot::RwLock;
use pyo3::{exceptions::PyOSError, prelude::*, types::PyList};

use crate::convert::{PyRegion, address, bytes16, daemon_user, hashes, milliseconds, region, value_error};
use crate::gpu::{driver, engine_stream, failed};
use crate::own::Own;
use crate::shard_layout::{PyShardLayout, shard_layouts};

/// The end of a save or load job. Exactly one comes for each job.
#[pyclass(name = "Finished", module = "kvlane._core", frozen)]
pub(crate) struct PyFinished(Finished);

#[pymethods]
impl PyFinished {
    #[getter]
    fn job(&self) -> u64 {
        self.0.job
    }

    #[getter]
    fn kind(&self) -> &'static str {
        match self.0.kind {
            JobKind::Released => "released",
            JobKind::Save => "save",
            JobKind::Load => "load",
        }
    }

    #[getter]
    fn ok(&self) -> bool {
        self.0.ok
    }

    #[getter]
    fn blocks(&self) -> u64 {
        self.0.blocks
    }

    #[getter]
    fn present(&self) -> u64 {
        self.0.present
    }

    #[getter]
    fn bytes(&self) -> u64 {
        self.0.bytes
    }

    #[getter]
    fn seconds(&self) -> f64 {
        self.0.seconds
    }

    #[getter]
    fn detail(&self) -> &str {
        &self.0.detail
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// (group, parent or b"", hashes, block ids).
type PySaveGroup<'py> = (u32, Vec<u8>, Bound<'py, PyList>, Vec<u32>);
/// (group, block ids, pages).
type PyLoadGroup = (u32, Vec<u32>, Vec<u8>);

/// One rank of an engine. `close` needs the worker alone; the other calls share it.
#[pyclass(name = "Worker", module = "kvlane._core", frozen)]
pub(crate) struct PyWorker(Own<RwLock<Worker>>);

#[pymethods]
impl PyWorker {
    #[new]
    #[pyo3(signature = (address, engine_id, client, rank, workers, groups, save_method = "auto", save_timeout_ms = 10_000.0, gpu = None, replicas = None, daemon_user = None, shards = None, layers = None, steps_ahead = 0.5, load_stall_ms = 0.0))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments for Python")]
    fn new(
        py: Python<'_>,
        address: Option<String>,
        engine_id: String,
        client: String,
        rank: u32,
        workers: u32,
        groups: Vec<(Vec<u8>, Vec<u8>, Vec<PyRegion>)>,
        save_method: &str,
        save_timeout_ms: f64,
        gpu: Option<Vec<u8>>,
        replicas: Option<Vec<u32>>,
        daemon_user: Option<&str>,
        shards: Option<Vec<Option<PyShardLayout>>>,
        layers: Option<Vec<Vec<u32>>>,
        steps_ahead: f64,
        load_stall_ms: f64,
    ) -> PyResult<Self> {
        if !(0.0..=16.0).contains(&steps_ahead) {
            return Err(value_error(format!("steps_ahead must be 0 to 16, not {steps_ahead}")));
        }
        let replicas = replicas.unwrap_or_else(|| vec![1; groups.len()]);
        if replicas.len() != groups.len() {
            let message = format!("replicas of {} groups came with {} groups", replicas.len(), groups.len());
            return Err(value_error(message));
        }
        let shards = shard_layouts(shards, groups.len())?;
        let layers = layers.unwrap_or_default();
        let of_regions = |(regions, layers): (&Vec<PyRegion>, &Vec<u32>)| regions.len() == layers.len();
        let regions = groups.iter().map(|(_, _, regions)| regions);
        if !layers.is_empty() && (layers.len() != groups.len() || !regions.zip(&layers).all(of_regions)) {
            return Err(value_error("layers needs a number for each region of each group"));
        }
        let groups: Vec<WorkerGroupSpec> = groups
            .into_iter()
            .zip(replicas)
            .map(|((namespace, layout, regions), replicas)| {
                Ok(WorkerGroupSpec {
                    namespace: bytes16("a namespace", &namespace)?,
                    layout: bytes16("a layout digest", &layout)?,
                    regions: regions.into_iter().map(region).collect(),
                    replicas,
                })
            })
            .collect::<PyResult<_>>()?;
        let save_method = match save_method {
            "auto" => SaveMethod::Auto,
            "process_vm" => SaveMethod::ProcessVm,
            "mapped" => SaveMethod::Mapped,
            other => {
                return Err(value_error(format!(
                    "save_method '{other}' is none of auto, process_vm and mapped"
                )));
            }
        };
        let gpu = match gpu {
            Some(uuid) => {
                let uuid = bytes16("a GPU's UUID", &uuid)?;
                let regions: Vec<_> = groups.iter().flat_map(|group| group.regions.clone()).collect();
                let made = py.detach(|| WorkerGpu::with_driver(driver()?, uuid, &regions).map_err(failed));
                Some(Arc::new(made?))
            }
            None => None,
        };
        // SAFETY: the caller registers the engine's KV tensors, which live until the engine's shutdown has closed
        // this worker; `_core.pyi` says so.
        let blocks = unsafe { OwnBlocks::new(groups, gpu) }.described(shards).read_by(layers);
        let options = WorkerOptions {
            address: self::address(address.as_deref())?,
            daemon_user: self::daemon_user(daemon_user)?,
            engine_id,
            client,
            rank: Rank(rank),
            workers,
            blocks,
            save_method,
            save_timeout: milliseconds(save_timeout_ms)?,
            release_ahead: ReleaseAhead { steps: steps_ahead, stall: milliseconds(load_stall_ms)? },
        };
        let started = py.detach(|| Worker::start(options));
        started.map(|worker| Self(Own::new(RwLock::new(worker)))).map_err(|error| match error {
            error @ (kvlane_client::StartError::Layout(_) | kvlane_client::StartError::Replicas { .. }) => {
                value_error(error)
            }
            kvlane_client::StartError::Io(error) => PyOSError::new_err(error.to_string()),
        })
    }

    #[getter]
    fn connected(&self) -> PyResult<bool> {
        Ok(self.0.get()?.read().is_connected())
    }

    #[getter]
    fn method(&self) -> PyResult<String> {
        Ok(self.0.get()?.read().method().0)
    }

    #[getter]
    fn reason(&self) -> PyResult<String> {
        let worker = self.0.get()?.read();
        let ((_, reason), refusal) = (worker.method(), worker.refusal());
        Ok(if refusal.is_empty() { reason } else { refusal })
    }

    #[pyo3(signature = (job, groups, stream = 0))]
    fn save(&self, job: u64, groups: Vec<PySaveGroup<'_>>, stream: u64) -> PyResult<()> {
        let groups = groups
            .into_iter()
            .map(|(group, parent, list, block_ids)| {
                let parent = if parent.is_empty() {
                    None
                } else {
                    Some(BlockHash::from_engine(&parent).map_err(value_error)?)
                };
                let hashes = hashes(&list)?;
                if hashes.len() != block_ids.len() {
                    let message = format!("{} hashes came with {} block ids", hashes.len(), block_ids.len());
                    return Err(value_error(message));
                }
                let block_ids = block_ids.into_iter().map(BlockId).collect();
                Ok(SaveGroupSpec { group, parent, hashes, block_ids })
            })
            .collect::<PyResult<_>>()?;
        self.0.get()?.read().save_after(job, groups, &engine_stream(stream));
        Ok(())
    }

    #[pyo3(signature = (job, boot, groups, stream = 0, release = "at_end"))]
    fn load(
        &self,
        job: u64,
        boot: &[u8],
        groups: Vec<PyLoadGroup>,
        stream: u64,
        release: &str,
    ) -> PyResult<()> {
        let release = match release {
            "at_end" => Release::AtEnd,
            "when_near" => Release::WhenNear,
            "at_once" => Release::AtOnce,
            other => {
                return Err(value_error(format!(
                    "release '{other}' is none of at_end, when_near and at_once"
                )));
            }
        };
        let boot = bytes16("a boot id", boot)?;
        let groups = groups
            .into_iter()
            .map(|(group, block_ids, pages)| {
                let pages = Pages::parse(&pages).map_err(|error| value_error(error.to_string()))?;
                let block_ids = block_ids.into_iter().map(BlockId).collect();
                Ok(LoadGroup { group, block_ids, pages: pages.iter().map(PoolPage).collect() })
            })
            .collect::<PyResult<_>>()?;
        self.0.get()?.read().load_after(job, boot, groups, &engine_stream(stream), release);
        Ok(())
    }

    fn outstanding_loads(&self) -> PyResult<Vec<u64>> {
        Ok(self.0.get()?.read().outstanding_loads())
    }

    #[pyo3(signature = (stream, jobs, region = None))]
    fn wait_for_loads(&self, stream: u64, jobs: Vec<u64>, region: Option<(u32, u32)>) -> PyResult<()> {
        let waited = self.0.get()?.read().wait_for_loads(&jobs, region, &engine_stream(stream));
        waited.map_err(|error| PyOSError::new_err(error.to_string()))
    }

    #[pyo3(signature = (computes, present = None, gone = Vec::new()))]
    fn step_begins(&self, computes: bool, present: Option<Vec<u8>>, gone: Vec<Vec<u8>>) -> PyResult<()> {
        let boot = |bytes: &Vec<u8>| bytes16("a boot id", bytes);
        let present = present.as_ref().map(boot).transpose()?;
        let gone = gone.iter().map(boot).collect::<PyResult<_>>()?;
        self.0.get()?.read().step_begins(computes, Promises { present, gone });
        Ok(())
    }

    fn poll(&self) -> PyResult<Vec<PyFinished>> {
        Ok(self.0.get()?.read().poll().into_iter().map(PyFinished).collect())
    }

    fn wait(&self, py: Python<'_>, timeout_ms: f64) -> PyResult<bool> {
        let timeout = milliseconds(timeout_ms)?;
        let worker = self.0.get()?;
        Ok(py.detach(|| worker.read().wait(timeout)))
    }

    /// Waits until registered with a daemon. False at the timeout, or at once when none answers.
    fn wait_registered(&self, py: Python<'_>, timeout_ms: f64) -> PyResult<bool> {
        let timeout = milliseconds(timeout_ms)?;
        let worker = self.0.get()?;
        Ok(py.detach(|| worker.read().wait_registered(timeout)))
    }

    fn take_stats(&self) -> PyResult<HashMap<&'static str, f64>> {
        let stats = self.0.get()?.read().take_stats();
        Ok(HashMap::from([
            ("connects", stats.connects as f64),
            ("losses", stats.losses as f64),
            ("save_timeouts", stats.save_timeouts as f64),
        ]))
    }

    fn close(&self, py: Python<'_>) {
        if let Some(worker) = self.0.if_here() {
            py.detach(|| worker.write().close());
        }
    }
}
