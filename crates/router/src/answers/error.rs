//! Why an answer is refused.

/// An engine's bytes are not an answer, or could be read in two ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AnswerError {
    /// No status line, or no header where one should stand.
    #[error("its answer does not begin as HTTP/1.1 does: {0}")]
    NotHttp(httparse::Error),
    /// A line of the head ends without CR.
    #[error("a line of its answer's head ends without CR")]
    BareLineFeed,
    /// The head is longer than the router accepts, or too many interim heads came before it.
    #[error("its answer's head has more than {0} bytes")]
    HeadTooLong(usize),
    /// Status 101, although the router has requested no other protocol.
    #[error("it switches protocols, which the router has not requested")]
    Switches,
    /// Content-Length beside Transfer-Encoding, or two different Content-Lengths.
    #[error("its answer's length is given in two ways")]
    TwoLengths,
    /// Content-Length is not a number of at most 64 bits.
    #[error("its answer's Content-Length is no number")]
    BadLength,
    /// Any Transfer-Encoding but `chunked`, or one in HTTP/1.0.
    #[error("its answer's Transfer-Encoding is not \"chunked\"")]
    BadEncoding,
    /// The line before a chunk is not a hexadecimal number, or one that is too large.
    #[error("a chunk of its answer has no size")]
    BadChunkSize,
    /// No CR and LF where a chunk or a trailer ends.
    #[error("a chunk of its answer does not end where it should")]
    BadChunkEnd,
    /// Chunk extensions and trailers together are longer than the router accepts.
    #[error("the chunk extensions and trailers of its answer have more than {0} bytes")]
    TooManyExtraBytes(usize),
}
