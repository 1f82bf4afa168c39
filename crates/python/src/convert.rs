//! From Python's values to ours, with errors that name the value.

use std::time::Duration;

use kvlane_block::{BlockHash, Region};
use kvlane_client::{DaemonUser, default_address};
use kvlane_proto::Address;
use pyo3::{exceptions::PyValueError, ffi, prelude::*, types::PyList};

/// Environment variables that name the daemon, and whose it may be.
const ADDRESS_VARIABLE: &str = "KVLANE_ADDR";
const USER_VARIABLE: &str = "KVLANE_DAEMON_USER";

/// The given address, else `KVLANE_ADDR`, else the default socket.
pub(crate) fn address(given: Option<&str>) -> PyResult<Address> {
    match (given, named(None, ADDRESS_VARIABLE)) {
        (Some(text), _) => text.parse().map_err(value_error),
        (None, Some(text)) => {
            text.parse().map_err(|error| value_error(format!("{ADDRESS_VARIABLE} {error}")))
        }
        (None, None) => Ok(default_address()),
    }
}

/// The given user, else `KVLANE_DAEMON_USER`, else nobody beside this user and root.
pub(crate) fn daemon_user(given: Option<&str>) -> PyResult<DaemonUser> {
    let user = named(given, USER_VARIABLE).map(|user| user.parse().map_err(value_error));
    user.unwrap_or_else(|| Ok(DaemonUser::default()))
}

fn named(given: Option<&str>, variable: &str) -> Option<String> {
    given.map(str::to_owned).or_else(|| std::env::var(variable).ok().filter(|value| !value.is_empty()))
}

pub(crate) fn value_error(error: impl ToString) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// A name of 16 bytes.
pub(crate) fn bytes16(what: &str, bytes: &[u8]) -> PyResult<[u8; 16]> {
    bytes.try_into().map_err(|_| value_error(format!("{what} has 16 bytes, this one {}", bytes.len())))
}

/// Milliseconds as Python gives them.
pub(crate) fn milliseconds(ms: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(ms / 1e3).map_err(|_| value_error(format!("{ms} ms is no time to wait")))
}

/// Block hashes of the engine, at least 16 bytes each.
pub(crate) fn hashes(list: &Bound<'_, PyList>) -> PyResult<Vec<BlockHash>> {
    let mut hashes = Vec::with_capacity(list.len());
    for index in 0..list.len() {
        // A lookup spends much of its time here: two calls for each hash instead of the seven that PyO3's iterator
        // and casts make over the stable ABI.
        let (mut start, mut length) = (std::ptr::null_mut(), 0);
        // SAFETY: `list` is a list that we hold, and the interpreter is attached. The item is borrowed from it, and
        // no Python code runs that could change the list before its bytes are copied below.
        let is_bytes = unsafe {
            let item = ffi::PyList_GetItem(list.as_ptr(), index as ffi::Py_ssize_t);
            !item.is_null() && ffi::PyBytes_AsStringAndSize(item, &mut start, &mut length) == 0
        };
        if !is_bytes {
            return Err(PyErr::fetch(list.py()));
        }
        // SAFETY: Python gave the bytes object's own buffer and its length; the object lives, as said above.
        let bytes = unsafe { std::slice::from_raw_parts(start.cast::<u8>(), length as usize) };
        hashes.push(BlockHash::from_engine(bytes).map_err(value_error)?);
    }
    Ok(hashes)
}

/// (base, block stride, blocks, piece bytes, piece offsets).
pub(crate) type PyRegion = (u64, u64, u64, u64, Vec<u64>);

pub(crate) fn region((base, block_stride, blocks, piece_bytes, piece_offsets): PyRegion) -> Region {
    Region { base, block_stride, blocks, piece_bytes, piece_offsets }
}
