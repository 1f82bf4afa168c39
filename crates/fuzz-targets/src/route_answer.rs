//! An engine's answers, of any bytes: refused, or the same head and data however they are cut.
use kvlane_router::answers::{AnswerError, HEAD_BYTES_MAX, head, head_ends};

/// Panics if a property fails for these bytes.
pub(crate) fn run(bytes: &[u8]) {
    let Ok(Some((first, length))) = head(bytes) else { return };
    assert!(length <= HEAD_BYTES_MAX);
    assert_eq!(head_ends(bytes, 0), Some(length));
    assert!(head(&bytes[..length - 1]).map_or(true, |found| found.is_none()));
    let body = &bytes[length..];
    let walk = |pieces: &mut dyn Iterator<Item = &[u8]>| -> Result<_, AnswerError> {
        let (mut framing, mut data, mut taken) = (first.framing.clone(), Vec::new(), 0);
        for piece in pieces {
            taken += framing.take(piece, |part| data.extend_from_slice(part))?;
        }
        assert!(taken <= body.len() && data.len() <= taken);
        assert!(taken == body.len() || framing.is_over());
        Ok((framing, data, taken))
    };
    assert_eq!(walk(&mut std::iter::once(body)), walk(&mut body.chunks(1)));
    assert_eq!(walk(&mut body.chunks(3)), walk(&mut body.chunks(7)));
}
