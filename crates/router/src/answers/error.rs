//! Why an answer is refused.

/// Bytes of an engine that are no answer, or could be read in two ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AnswerError {
    /// No status line, or no header where one should stand.
    #[error("its answer does not begin as HTTP/1.1 does: {0}")]
    NotHttp(httparse::Error),
    /// A line that ends without CR.
    #[error("a line of its answer's head ends without CR")]
    BareLineFeed,
    /// More than is taken.
    #[error("its answer's head has more than {0} bytes")]
    HeadTooLong(usize),
    /// 101: nobody has asked for another protocol.
    #[error("it switches protocols, unasked")]
    Switches,
    /// Content-Length beside Transfer-Encoding, or twice with two values.
    #[error("its answer's length is given in two ways")]
    TwoLengths,
    /// Not a number, or none that 64 bits hold.
    #[error("its answer's Content-Length is no number")]
    BadLength,
    /// Anything but `chunked`, or chunks in HTTP/1.0.
    #[error("its answer's Transfer-Encoding is not \"chunked\"")]
    BadEncoding,
    /// The line before a chunk is no hexadecimal number, or one too large.
    #[error("a chunk of its answer has no size")]
    BadChunkSize,
    /// Something else stands where a chunk ends.
    #[error("a chunk of its answer does not end where it should")]
    BadChunkEnd,
    /// Of chunks' extensions, or of trailers.
    #[error("what stands around the chunks of its answer has more than {0} bytes")]
    TooMuchAround(usize),
}
