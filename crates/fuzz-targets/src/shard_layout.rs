//! Shard layouts of two workers, of any bytes: refused, or one layout whose comparison gives the same from both sides.
use kvlane_proto::shard_layout::{decode_shard_layout, encode_shard_layout};

use crate::halves::halves;

/// Panics if a property fails for these bytes.
pub(crate) fn run(bytes: &[u8]) {
    let (one, other) = halves(bytes);
    let Ok(here) = decode_shard_layout(one) else { return };
    assert_eq!(here.check(), Ok(()));
    assert!(!here.to_string().is_empty());
    // A field that was left out may take more bytes when it is written, but its meaning stays the same.
    if let Ok(bytes) = encode_shard_layout(&here) {
        assert_eq!(decode_shard_layout(&bytes).as_ref(), Ok(&here));
    }
    let Ok(there) = decode_shard_layout(other) else { return };
    let (one, other) = (here.compare(&there), there.compare(&here));
    assert_eq!(one.is_ok(), here == there);
    match (one, other) {
        (Ok(()), Ok(())) => {}
        (Err(one), Err(other)) => {
            assert_eq!(one.all().len(), other.all().len());
            assert!(!one.to_string().is_empty());
            assert_eq!(one.certain().is_some(), other.certain().is_some());
        }
        differing => panic!("from one side only: {differing:?}"),
    }
}
