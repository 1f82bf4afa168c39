//! Trace files of any bytes: each line is refused, or read within the limits.
use kvlane_trace::file::{BLOCKS_MAX, Parser};

/// Panics if a property fails for these bytes.
pub(crate) fn run(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let (mut parser, mut again) = (Parser::default(), Parser::default());
    for line in text.lines() {
        let read = parser.line(line);
        assert_eq!(read, again.line(line), "the same line twice");
        let Ok(Some(request)) = read else { continue };
        assert!(request.ids.len() <= BLOCKS_MAX && request.saved.len() <= BLOCKS_MAX);
        assert!(request.hit.ram.max(request.hit.ssd).max(request.hit.peers) <= request.ids.len() as u64);
        assert!(parser.format().is_some());
    }
    if let Some(header) = parser.header() {
        // JSON has no infinite numbers.
        assert_eq!(header.to_line().chars().filter(|c| *c == '\n').count(), 1);
        assert!(header.tokens_per_block > 0 || header.requests == 0);
    }
}
