//! Commands at a router's socket and the addresses in them, of any bytes: refused, or read and written alike.
use kvlane_router::{
    address::Address,
    members::{CALL_BYTES_MAX, Call, read_call},
};

/// Panics if a property fails for these bytes.
pub(crate) fn run(bytes: &[u8]) {
    let Ok(call) = read_call(bytes) else { return };
    assert!(bytes.len() <= CALL_BYTES_MAX);
    let written = serde_json::to_vec(&call).expect("a call can be written");
    if written.len() <= CALL_BYTES_MAX {
        assert_eq!(read_call(&written).as_ref(), Ok(&call));
    }
    let (Call::Drain { node } | Call::Remove { node, .. } | Call::Add { url: node, .. }) = &call else {
        return;
    };
    if let Ok(address) = node.parse::<Address>() {
        assert_eq!(address.to_string().parse(), Ok(address));
    }
}
