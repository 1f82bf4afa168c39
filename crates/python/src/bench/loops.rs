//! Bare loops that benchmarks compare kvlane with: what the machine does with nothing of kvlane in the way.
//!
//! They take addresses and descriptors as numbers, so a wrong one is a crash; only `kvlane.bench` calls them.

use std::{io, time::Instant};

use libc::{c_int, c_ulong, c_void, iovec, pid_t};
use pyo3::prelude::*;

/// Ranges that one process_vm call takes.
const RANGES_MAX: usize = 1024;

/// Reads `length` bytes at each first address of process `pid` to the second address of this one, in calls of
/// `pieces_per_call`; the seconds that it took.
#[pyfunction]
pub(crate) fn read_process(
    py: Python<'_>,
    pid: pid_t,
    pieces: Vec<(usize, usize)>,
    length: usize,
    pieces_per_call: usize,
) -> PyResult<f64> {
    assert!((1..=RANGES_MAX).contains(&pieces_per_call), "{pieces_per_call} pieces do not fit into one call");
    Ok(py.detach(|| {
        let range = |address: usize| iovec { iov_base: address as *mut c_void, iov_len: length };
        let sources: Vec<iovec> = pieces.iter().map(|piece| range(piece.0)).collect();
        let targets: Vec<iovec> = pieces.iter().map(|piece| range(piece.1)).collect();
        let start = Instant::now();
        for (from, to) in sources.chunks(pieces_per_call).zip(targets.chunks(pieces_per_call)) {
            let ranges = from.len() as c_ulong;
            // SAFETY: the benchmark names ranges of its own mapping as targets, which live and are used by nobody
            // else meanwhile; the kernel checks those of the other process.
            let read = unsafe { libc::process_vm_readv(pid, to.as_ptr(), ranges, from.as_ptr(), ranges, 0) };
            complete(read, from.len() * length)?;
        }
        Ok::<f64, io::Error>(start.elapsed().as_secs_f64())
    })?)
}

/// Copies `length` bytes from each first address to the second one by memcpy; the seconds that it took.
#[pyfunction]
pub(crate) fn copy(py: Python<'_>, pieces: Vec<(usize, usize)>, length: usize) -> f64 {
    py.detach(|| {
        let start = Instant::now();
        for (from, to) in pieces {
            // SAFETY: the benchmark names ranges of two live mappings of its own, which nobody else uses meanwhile.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    std::ptr::with_exposed_provenance::<u8>(from),
                    std::ptr::with_exposed_provenance_mut::<u8>(to),
                    length,
                );
            }
        }
        start.elapsed().as_secs_f64()
    })
}

/// Sends `length` bytes over the socket and waits for as many; the seconds of one round trip.
#[pyfunction]
pub(crate) fn ping_pong(py: Python<'_>, socket: c_int, length: usize) -> PyResult<f64> {
    Ok(py.detach(|| {
        let mut bytes = vec![1; length];
        let start = Instant::now();
        send(socket, &bytes)?;
        receive(socket, &mut bytes)?;
        Ok::<f64, io::Error>(start.elapsed().as_secs_f64())
    })?)
}

/// Sends back messages of `length` bytes until the peer closes the socket.
#[pyfunction]
pub(crate) fn echo(py: Python<'_>, socket: c_int, length: usize) -> PyResult<()> {
    Ok(py.detach(|| {
        let mut bytes = vec![0; length];
        while receive(socket, &mut bytes)? {
            send(socket, &bytes)?;
        }
        Ok::<(), io::Error>(())
    })?)
}

fn send(socket: c_int, bytes: &[u8]) -> io::Result<()> {
    // SAFETY: the bytes are live; a descriptor that is no socket is refused by the kernel.
    let sent = unsafe { libc::send(socket, bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) };
    complete(sent, bytes.len())
}

/// False when the peer has closed the socket.
fn receive(socket: c_int, bytes: &mut [u8]) -> io::Result<bool> {
    // SAFETY: as in `send`, and the bytes are this call's alone.
    let received = unsafe { libc::recv(socket, bytes.as_mut_ptr().cast(), bytes.len(), libc::MSG_WAITALL) };
    if received == 0 {
        return Ok(false);
    }
    complete(received, bytes.len()).map(|()| true)
}

/// A call that moved less than all would make the loop look faster than it is.
fn complete(moved: isize, wanted: usize) -> io::Result<()> {
    match usize::try_from(moved) {
        Ok(moved) if moved == wanted => Ok(()),
        Ok(moved) => Err(io::Error::other(format!("the kernel moved {moved} bytes of {wanted}"))),
        Err(_) => Err(io::Error::last_os_error()),
    }
}
