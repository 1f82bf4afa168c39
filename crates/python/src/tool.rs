//! A connection for tools, tests and benchmarks.

use std::time::Duration;

use kvlane_block::PoolOffset;
use kvlane_client::{Tool, ToolError};
use parking_lot::Mutex;
use pyo3::{
    exceptions::{PyConnectionError, PyOSError, PyTimeoutError, PyValueError},
    prelude::*,
    types::{PyBytes, PyDict},
};

use crate::convert::{address, bytes16, daemon_user, milliseconds};
use crate::own::Own;

/// Status, settle, and the pool itself.
#[pyclass(name = "Tool", module = "kvlane._core", frozen)]
pub(crate) struct PyTool(Own<Mutex<Option<Tool>>>);

#[pymethods]
impl PyTool {
    #[new]
    #[pyo3(signature = (address, timeout_ms = 1000.0, daemon_user = None))]
    fn new(
        py: Python<'_>,
        address: Option<&str>,
        timeout_ms: f64,
        daemon_user: Option<&str>,
    ) -> PyResult<Self> {
        let user = self::daemon_user(daemon_user)?;
        let address = self::address(address)?;
        let timeout = milliseconds(timeout_ms)?;
        let tool = py.detach(|| Tool::connect_to_user(&address, user, timeout)).map_err(error)?;
        Ok(Self(Own::new(Mutex::new(Some(tool)))))
    }

    #[getter]
    fn boot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        self.with(py, |tool| Ok(tool.boot())).map(|boot| PyBytes::new(py, &boot))
    }

    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let status = self.with(py, Tool::status)?;
        let dict = PyDict::new(py);
        dict.set_item("version", status.version)?;
        dict.set_item("uptime_ms", status.uptime_ms)?;
        dict.set_item("pool_bytes", status.pool_bytes)?;
        dict.set_item("used_bytes", status.used_bytes)?;
        dict.set_item("blocks", status.blocks)?;
        dict.set_item("leased_blocks", status.leased_blocks)?;
        dict.set_item("claimed_blocks", status.claimed_blocks)?;
        dict.set_item("page_size", status.page_size)?;
        let mut sessions = Vec::new();
        for session in status.sessions {
            let entry = PyDict::new(py);
            entry.set_item("session", session.session_id)?;
            entry.set_item("engine", session.engine_id)?;
            entry.set_item("role", session.role)?;
            entry.set_item("pid", session.pid)?;
            entry.set_item("client", session.client)?;
            entry.set_item("silent_ms", session.silent_ms)?;
            entry.set_item("method", session.method)?;
            entry.set_item("reason", session.reason)?;
            sessions.push(entry);
        }
        dict.set_item("sessions", sessions)?;
        let mut namespaces = Vec::new();
        for namespace in status.namespaces {
            let entry = PyDict::new(py);
            entry.set_item("namespace", PyBytes::new(py, &namespace.namespace))?;
            entry.set_item("name", namespace.name)?;
            entry.set_item("blocks", namespace.blocks)?;
            entry.set_item("bytes", namespace.bytes)?;
            entry.set_item("shards", namespace.shards)?;
            entry.set_item("hit_blocks", namespace.hit_blocks)?;
            entry.set_item("missed_blocks", namespace.missed_blocks)?;
            entry.set_item("ssd_blocks", namespace.ssd_blocks)?;
            entry.set_item("ssd_bytes", namespace.ssd_bytes)?;
            namespaces.push(entry);
        }
        dict.set_item("namespaces", namespaces)?;
        let mut ssds = Vec::new();
        for ssd in status.ssds {
            let entry = PyDict::new(py);
            entry.set_item("path", ssd.path)?;
            entry.set_item("capacity_bytes", ssd.capacity_bytes)?;
            entry.set_item("used_bytes", ssd.used_bytes)?;
            entry.set_item("method", ssd.method)?;
            entry.set_item("trouble", ssd.trouble)?;
            entry.set_item("transfer_path", ssd.transfer_path)?;
            entry.set_item("path_reason", ssd.path_reason)?;
            entry.set_item("direct_bytes_per_second", ssd.direct_bytes_per_second)?;
            entry.set_item("staged_bytes_per_second", ssd.staged_bytes_per_second)?;
            entry.set_item("staging_bytes", ssd.staging_bytes)?;
            ssds.push(entry);
        }
        dict.set_item("ssds", ssds)?;
        dict.set_item("ssd_blocks", status.ssd_blocks)?;
        dict.set_item("is_partial", status.is_partial)?;
        dict.set_item("policy", status.policy)?;
        dict.set_item("active_policy", status.active_policy)?;
        let shadows = PyDict::new(py);
        for shadow in status.shadow_hit_ratios {
            shadows.set_item(shadow.policy, shadow.hit_ratio)?;
        }
        dict.set_item("shadow_hit_ratios", shadows)?;
        Ok(dict)
    }

    #[pyo3(signature = (timeout_ms = 10_000))]
    fn settle(&self, py: Python<'_>, timeout_ms: u64) -> PyResult<()> {
        self.with(py, |tool| tool.settle(Duration::from_millis(timeout_ms)))
    }

    fn drop_namespaces(&self, py: Python<'_>, namespaces: Vec<Vec<u8>>) -> PyResult<()> {
        let named = namespaces.iter().map(|n| bytes16("a namespace", n)).collect::<PyResult<Vec<_>>>()?;
        self.with(py, |tool| tool.drop_namespaces(&named))
    }

    fn read_pool<'py>(&self, py: Python<'py>, offset: u64, length: u64) -> PyResult<Bound<'py, PyBytes>> {
        self.with(py, |tool| tool.read_pool(PoolOffset(offset), length)).map(|bytes| PyBytes::new(py, &bytes))
    }

    fn write_pool(&self, py: Python<'_>, offset: u64, data: &[u8]) -> PyResult<()> {
        self.with(py, |tool| tool.write_pool(PoolOffset(offset), data))
    }

    fn close(&self, py: Python<'_>) {
        let Some(shared) = self.0.if_here() else { return };
        py.detach(|| {
            let tool = shared.lock().take();
            if let Some(tool) = tool {
                tool.close();
            }
        });
    }
}

impl PyTool {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Tool) -> Result<T, ToolError> + Send,
    ) -> PyResult<T> {
        let shared = self.0.get()?;
        py.detach(|| {
            let mut tool = shared.lock();
            let tool = tool.as_mut().ok_or_else(|| PyValueError::new_err("the tool is closed"))?;
            call(tool).map_err(error)
        })
    }
}

fn error(error: ToolError) -> PyErr {
    let sentence = error.to_string();
    match error {
        ToolError::Connect(_) | ToolError::Lost(_) => PyConnectionError::new_err(sentence),
        ToolError::Timeout(_) => PyTimeoutError::new_err(sentence),
        ToolError::Random(_) => PyOSError::new_err(sentence),
        ToolError::Refused(_) | ToolError::Pool(_) => PyValueError::new_err(sentence),
    }
}
