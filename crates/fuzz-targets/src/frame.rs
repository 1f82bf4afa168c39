//! A byte stream cut anywhere: the frames that come out do not depend on where it was cut.
use kvlane_proto::{FrameError, FrameReader, v1::Request};

use crate::halves::halves;

fn take(reader: &mut FrameReader, into: &mut Vec<Request>) -> Result<(), FrameError> {
    while let Some(message) = reader.next_message()? {
        into.push(message);
    }
    Ok(())
}

/// Panics if a property fails for these bytes.
pub(crate) fn run(bytes: &[u8]) {
    let (cuts, stream) = halves(bytes);
    let mut whole = FrameReader::default();
    let mut expected = Vec::new();
    whole.push(stream);
    let end = take(&mut whole, &mut expected);

    let mut pieces = FrameReader::default();
    let mut found = Vec::new();
    let mut rest = stream;
    let mut cuts = cuts.iter().copied();
    let end_in_pieces = loop {
        let cut = usize::from(cuts.next().unwrap_or(255)).min(rest.len());
        pieces.push(&rest[..cut]);
        rest = &rest[cut..];
        let end = take(&mut pieces, &mut found);
        if end.is_err() || rest.is_empty() {
            break end;
        }
        if cut == 0 && cuts.len() == 0 {
            pieces.push(rest);
            break take(&mut pieces, &mut found);
        }
    };
    assert_eq!(found, expected);
    assert_eq!(end_in_pieces, end);
    if end.is_ok() {
        assert_eq!(pieces.missing(), whole.missing());
    }
}
