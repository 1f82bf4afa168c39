//! The scheduler's connection to the daemon, for Python.

use std::{collections::HashMap, time::Duration};

use kvlane_block::Rank;
use kvlane_client::{AwaitedSave, BlockChange, GroupSpec, Hit, LookupRequest, Scheduler, SchedulerOptions};
use kvlane_proto::v1::{EndedRequest, ended_request::Leg};
use parking_lot::Mutex;
use pyo3::{
    prelude::*,
    types::{PyBytes, PyList},
};

use crate::convert::{address, bytes16, daemon_user, hashes, milliseconds, value_error};
use crate::own::Own;

/// How long a poll of a lookup keeps the interpreter while it waits. Each Python thread that computes keeps it for 5 ms, so to
/// get it back beside four of them takes 20 ms. An answer takes 0.1 ms.
const WAIT_ATTACHED: Duration = Duration::from_millis(1);

/// A stored or removed block: its group, its hash, and whether it was stored.
type Change<'py> = (u32, Bound<'py, PyBytes>, bool);

/// An ended request: its number, tokens (prompt, answer, in the engine's own cache), age in ms, leg, and the blocks that were
/// saved from the first of these on.
type Ended<'py> = (u64, (u64, u64, u64), u64, String, u64, Bound<'py, PyList>);

/// The result of a lookup. `tokens == 0` is a miss and has no lease.
#[pyclass(name = "Hit", module = "kvlane._core", frozen)]
pub(crate) struct PyHit(Hit);

#[pymethods]
impl PyHit {
    #[getter]
    fn tokens(&self) -> u64 {
        self.0.tokens
    }

    #[getter]
    fn lease(&self) -> u64 {
        self.0.lease
    }

    #[getter]
    fn boot<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.boot)
    }

    #[getter]
    fn groups(&self) -> Vec<(u32, u64)> {
        self.0.groups().collect()
    }

    fn stored_blocks(&self, group: u32) -> u64 {
        self.0.stored_blocks(group)
    }

    fn pages<'py>(&self, py: Python<'py>, group: u32, rank: u32) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.pages(group, Rank(rank)))
    }

    fn pages_of<'py>(
        &self,
        py: Python<'py>,
        group: u32,
        rank: u32,
        blocks: Vec<u64>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let pages = self.0.pages_of(group, Rank(rank), &blocks);
        let pages = pages.ok_or_else(|| value_error("not all of these blocks are in the hit"))?;
        Ok(PyBytes::new(py, &pages))
    }

    fn __repr__(&self) -> String {
        format!("Hit(tokens={}, lease={})", self.0.tokens, self.0.lease)
    }
}

/// The scheduler's connection. No call blocks longer than it says.
#[pyclass(name = "Scheduler", module = "kvlane._core", frozen)]
pub(crate) struct PyScheduler(Own<Mutex<Scheduler>>);

#[pymethods]
impl PyScheduler {
    #[new]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments for Python")]
    #[pyo3(signature = (address, engine_id, client, groups, workers, lookup_timeout_ms = 50.0, daemon_user = None, follow_journal = false, crosses_hosts = false))]
    fn new(
        address: Option<String>,
        engine_id: String,
        client: String,
        groups: Vec<(Vec<u8>, String, u32, u32)>,
        workers: u32,
        lookup_timeout_ms: f64,
        daemon_user: Option<&str>,
        follow_journal: bool,
        crosses_hosts: bool,
    ) -> PyResult<Self> {
        let groups = groups
            .into_iter()
            .map(|(namespace, name, tokens_per_block, window_blocks)| {
                let namespace = bytes16("a namespace", &namespace)?;
                Ok(GroupSpec { namespace, name, tokens_per_block, window_blocks, crosses_hosts })
            })
            .collect::<PyResult<_>>()?;
        let scheduler = Scheduler::new(SchedulerOptions {
            address: self::address(address.as_deref())?,
            daemon_user: self::daemon_user(daemon_user)?,
            engine_id,
            client,
            groups,
            workers,
            lookup_timeout: milliseconds(lookup_timeout_ms)?,
            follows_journal: follow_journal,
        })?;
        Ok(Self(Own::new(Mutex::new(scheduler))))
    }

    #[getter]
    fn connected(&self) -> PyResult<bool> {
        Ok(self.0.get()?.lock().is_connected())
    }

    #[getter]
    fn ready(&self) -> PyResult<bool> {
        Ok(self.0.get()?.lock().is_ready())
    }

    #[getter]
    fn boot<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        Ok(self.0.get()?.lock().boot().map(|boot| PyBytes::new(py, &boot)))
    }

    #[getter]
    fn pool_bytes(&self) -> PyResult<u64> {
        Ok(self.0.get()?.lock().pool_bytes())
    }

    #[getter]
    fn run<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &self.0.get()?.lock().run()))
    }

    #[getter]
    fn engine_id(&self) -> PyResult<String> {
        Ok(self.0.get()?.lock().engine_id().to_owned())
    }

    #[getter]
    fn gone<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        Ok(self.0.get()?.lock().gone().map(|boot| PyBytes::new(py, &boot)).collect())
    }

    #[getter]
    fn over<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        Ok(self.0.get()?.lock().over().map(|boot| PyBytes::new(py, &boot)).collect())
    }

    #[getter]
    fn address(&self) -> PyResult<String> {
        Ok(self.0.get()?.lock().address().to_string())
    }

    #[getter]
    fn refusal(&self) -> PyResult<String> {
        Ok(self.0.get()?.lock().last_refusal().unwrap_or_default().to_owned())
    }

    #[getter]
    fn is_recorded(&self) -> PyResult<bool> {
        Ok(self.0.get()?.lock().is_recorded())
    }

    #[allow(clippy::too_many_arguments, reason = "keyword arguments for Python")]
    #[pyo3(signature = (request_id, hashes, max_tokens, handoff = None, tokens_per_s = 0, number = 0, again = false, traceparent = ""))]
    fn lookup_start(
        &self,
        request_id: &str,
        hashes: Vec<Bound<'_, PyList>>,
        max_tokens: u64,
        handoff: Option<(String, Vec<u8>, u64, u32)>,
        tokens_per_s: u32,
        number: u64,
        again: bool,
        traceparent: &str,
    ) -> PyResult<()> {
        let hashes = all_hashes(&hashes)?;
        let awaited_save = handoff.map(|(engine_id, run, tokens, wait_ms)| {
            let run = bytes16("a run", &run)?;
            Ok::<_, PyErr>(AwaitedSave { engine_id, run, tokens, wait_ms })
        });
        let mut scheduler = self.0.get()?.lock();
        let request = LookupRequest { name: request_id, number, again, traceparent };
        scheduler.lookup_start(&request, &hashes, max_tokens, awaited_save.transpose()?, tokens_per_s);
        Ok(())
    }

    #[pyo3(signature = (request_id, wait_us = 0))]
    fn lookup_poll(&self, py: Python<'_>, request_id: &str, wait_us: u64) -> PyResult<Option<PyHit>> {
        let scheduler = self.0.get()?;
        let wait = Duration::from_micros(wait_us);
        let attached = wait.min(WAIT_ATTACHED);
        let poll = |wait| scheduler.lock().lookup_poll(request_id, wait).map(PyHit);
        let answer = poll(attached);
        let is_over = answer.is_some() || attached == wait;
        Ok(if is_over { answer } else { py.detach(|| poll(wait - attached)) })
    }

    #[pyo3(signature = (hashes, max_tokens, timeout_ms = 1000.0))]
    fn lookup(
        &self,
        py: Python<'_>,
        hashes: Vec<Bound<'_, PyList>>,
        max_tokens: u64,
        timeout_ms: f64,
    ) -> PyResult<PyHit> {
        let hashes = all_hashes(&hashes)?;
        let timeout = milliseconds(timeout_ms)?;
        let scheduler = self.0.get()?;
        Ok(PyHit(py.detach(|| scheduler.lock().lookup(&hashes, max_tokens, timeout))))
    }

    fn forget(&self, request_id: &str) -> PyResult<()> {
        self.0.get()?.lock().forget(request_id);
        Ok(())
    }

    fn release(&self, boot: &[u8], lease: u64) -> PyResult<()> {
        self.0.get()?.lock().release(bytes16("a boot id", boot)?, lease);
        Ok(())
    }

    fn tick(&self) -> PyResult<()> {
        self.0.get()?.lock().tick();
        Ok(())
    }

    #[pyo3(signature = (up_to_job, timeout_ms = 1000.0))]
    fn cancel_saves(&self, py: Python<'_>, up_to_job: u64, timeout_ms: f64) -> PyResult<bool> {
        let timeout = milliseconds(timeout_ms)?;
        let scheduler = self.0.get()?;
        Ok(py.detach(|| scheduler.lock().cancel_saves(up_to_job.saturating_add(1), timeout)))
    }

    fn requests_ended(&self, requests: Vec<Ended<'_>>) -> PyResult<()> {
        let end = |(
            number,
            (prompt_tokens, output_tokens, engine_tokens),
            age_ms,
            leg,
            first_block,
            hashes,
        ): Ended<'_>| {
            let hashes = self::hashes(&hashes)?;
            let mut concatenated = Vec::with_capacity(hashes.len() * 16);
            hashes.iter().for_each(|hash| concatenated.extend_from_slice(&hash.0));
            let leg = match leg.as_str() {
                "prefill" => Leg::Prefill,
                "decode" => Leg::Decode,
                _ => Leg::Whole,
            };
            Ok::<_, PyErr>(EndedRequest {
                request: number,
                prompt_tokens,
                output_tokens,
                engine_tokens,
                age_ms,
                leg: leg.into(),
                first_block,
                hashes: concatenated.into(),
            })
        };
        let ended = requests.into_iter().map(end).collect::<PyResult<_>>()?;
        self.0.get()?.lock().requests_ended(ended);
        Ok(())
    }

    fn take_changes<'py>(&self, py: Python<'py>) -> PyResult<(bool, Vec<Change<'py>>)> {
        let taken = self.0.get()?.lock().take_changes();
        let change = |change: BlockChange| (change.group, PyBytes::new(py, &change.hash), change.is_visible);
        Ok((taken.start_again, taken.changes.into_iter().map(change).collect()))
    }

    fn take_stats(&self) -> PyResult<HashMap<&'static str, f64>> {
        let stats = self.0.get()?.lock().take_stats();
        Ok(HashMap::from([
            ("lookups", stats.lookups as f64),
            ("hits", stats.hits as f64),
            ("misses", stats.misses as f64),
            ("timeouts", stats.timeouts as f64),
            ("unavailable", stats.unavailable as f64),
            ("connects", stats.connects as f64),
            ("losses", stats.losses as f64),
            ("lookup_seconds", stats.lookup_seconds),
        ]))
    }

    fn close(&self, py: Python<'_>) {
        if let Some(scheduler) = self.0.if_here() {
            py.detach(|| scheduler.lock().close());
        }
    }
}

fn all_hashes(groups: &[Bound<'_, PyList>]) -> PyResult<Vec<Vec<kvlane_block::BlockHash>>> {
    groups.iter().map(hashes).collect()
}
