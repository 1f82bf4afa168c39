//! Measurements of GPUs for `kvlane.bench`.

use std::sync::Arc;

use kvlane_gpu::{
    Calibration, Direction, Gpu, HostBuffer, RailChoice, RailOptions, Rails,
    bench::{CopyMethod, Path, Shape, measure_copy, measure_rails, measure_together},
    calibrate::CALIBRATION_BYTES,
};
use pyo3::prelude::*;

use crate::convert::value_error;
use crate::gpu::{driver, failed};

/// Ordinal, name, PCI address and bytes of each GPU. OSError with the reason if there is no driver.
#[pyfunction]
pub(crate) fn gpus() -> PyResult<Vec<(u32, String, String, u64)>> {
    let devices = driver()?.devices().map_err(failed)?;
    Ok(devices.into_iter().map(|d| (d.ordinal, d.name, d.pci_bus_id, d.total_bytes)).collect())
}

/// GB/s of copies of one shape. `path` is "h2d", "d2h" or "peer"; `method` "contiguous", "engine", "batch", "kernel" or
/// "auto". The bytes are checked.
#[pyfunction]
#[pyo3(signature = (gpu, path, total_bytes, piece_bytes, method, blocks = 16, peer = None))]
#[allow(clippy::too_many_arguments, reason = "keyword arguments for Python")]
pub(crate) fn gpu_copy(
    py: Python<'_>,
    gpu: u32,
    path: &str,
    total_bytes: u64,
    piece_bytes: u64,
    method: &str,
    blocks: u32,
    peer: Option<u32>,
) -> PyResult<f64> {
    let driver = driver()?;
    let device = Gpu::open(Arc::clone(&driver), gpu).map_err(failed)?;
    let path = match (path, peer) {
        ("h2d", None) => Path::HostToDevice,
        ("d2h", None) => Path::DeviceToHost,
        ("peer", Some(peer)) => Path::Peer(Gpu::open(driver, peer).map_err(failed)?),
        _ => return Err(value_error(format!("path '{path}' is h2d, d2h, or peer with a second GPU"))),
    };
    let method = method_named(method, blocks)?;
    let shape = Shape { total_bytes, piece_bytes, joined: 1, shuffled: true, path };
    py.detach(|| measure_copy(&device, &shape, method)).map_err(failed)
}

/// (path, bytes of a piece, way to copy, GB/s) for each, and (path, bytes from which on a batch call of copy engines is
/// chosen, the same for single copies), as the daemon measures at its start.
#[pyfunction]
#[allow(clippy::type_complexity, reason = "tuples for Python")]
pub(crate) fn gpu_calibrate(
    py: Python<'_>,
    gpu: u32,
) -> PyResult<(Vec<(&'static str, u64, &'static str, f64)>, Vec<(&'static str, u64, u64)>)> {
    let device = Gpu::open(driver()?, gpu).map_err(failed)?;
    let measured = py.detach(|| {
        let host = HostBuffer::new(&device, CALIBRATION_BYTES)?;
        // SAFETY: the buffer is pinned, and ours alone.
        unsafe { Calibration::measure(&device, host.address(), host.bytes()) }
    });
    let measured = measured.map_err(failed)?;
    let rates = measured.rates().iter().map(|rate| {
        let method = match rate.method {
            CopyMethod::Kernel { .. } => "kernel",
            CopyMethod::Batch => "batch",
            _ => "engine",
        };
        (path_name(rate.direction), rate.piece_bytes, method, rate.gb_per_s)
    });
    let thresholds = [Direction::HostToDevice, Direction::DeviceToHost].map(|direction| {
        let chosen = measured.thresholds(direction);
        (path_name(direction), chosen.batch_bytes, chosen.engine_bytes)
    });
    Ok((rates.collect(), thresholds.to_vec()))
}

fn path_name(direction: Direction) -> &'static str {
    match direction {
        Direction::HostToDevice => "h2d",
        Direction::DeviceToHost => "d2h",
        Direction::Peer => "peer",
    }
}

/// Ordinals of the GPUs whose links a load for this one can use too.
#[pyfunction]
pub(crate) fn gpu_rails(gpu: u32) -> PyResult<Vec<u32>> {
    let driver = driver()?;
    let device = Gpu::open(Arc::clone(&driver), gpu).map_err(failed)?;
    let rails = Rails::new(driver, &[], RailOptions::default()).map_err(failed)?;
    Ok(rails.loader(&device, "a benchmark").reached())
}

/// GB/s from the host to a GPU over its own link and those of `rails`. `joined` pieces are consecutive in the host's memory, as
/// a block's layers are in the pool. If `staged`, the bytes go through a ring on the GPU in long runs. The bytes are checked.
#[pyfunction]
#[pyo3(signature = (gpu, rails, total_bytes, piece_bytes, joined = 4, slot_bytes = None, slots = None, staged = false))]
#[allow(clippy::too_many_arguments, reason = "keyword arguments for Python")]
pub(crate) fn gpu_load(
    py: Python<'_>,
    gpu: u32,
    rails: Vec<u32>,
    total_bytes: u64,
    piece_bytes: u64,
    joined: u64,
    slot_bytes: Option<u64>,
    slots: Option<usize>,
    staged: bool,
) -> PyResult<f64> {
    let device = Gpu::open(driver()?, gpu).map_err(failed)?;
    let usual = RailOptions::default();
    let options = RailOptions {
        choice: RailChoice::List(rails.iter().map(u32::to_string).collect()),
        slot_bytes: slot_bytes.unwrap_or(usual.slot_bytes),
        slots: slots.unwrap_or(usual.slots),
        ..usual
    };
    let shape = Shape { total_bytes, piece_bytes, joined, shuffled: true, path: Path::HostToDevice };
    py.detach(|| measure_rails(&device, options, &shape, staged)).map_err(failed)
}

/// GB/s in sum from the host to each of these GPUs at the same time. `method`, `joined` and `staged` as above. The bytes are
/// checked.
#[pyfunction]
#[pyo3(signature = (gpus, total_bytes, piece_bytes, method, joined = 1, staged = false))]
pub(crate) fn gpu_together(
    py: Python<'_>,
    gpus: Vec<u32>,
    total_bytes: u64,
    piece_bytes: u64,
    method: &str,
    joined: u64,
    staged: bool,
) -> PyResult<f64> {
    let (driver, method) = (driver()?, method_named(method, 16)?);
    let open = |ordinal: u32| Gpu::open(Arc::clone(&driver), ordinal).map_err(failed);
    let gpus = gpus.into_iter().map(open).collect::<PyResult<Vec<Gpu>>>()?;
    let shape = Shape { total_bytes, piece_bytes, joined, shuffled: true, path: Path::HostToDevice };
    py.detach(|| measure_together(&gpus, &shape, method, staged)).map_err(failed)
}

fn method_named(name: &str, blocks: u32) -> PyResult<CopyMethod> {
    match name {
        "contiguous" => Ok(CopyMethod::Contiguous),
        "engine" => Ok(CopyMethod::CopyEngine),
        "batch" => Ok(CopyMethod::Batch),
        "kernel" => Ok(CopyMethod::Kernel { blocks }),
        "auto" => Ok(CopyMethod::Auto),
        other => Err(value_error(format!("there is no way to copy called '{other}'"))),
    }
}
