//! Why a body is refused.

/// The router cannot use a body. The text is for the client. `at` is an offset in bytes from the body's beginning.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    /// The body is not UTF-8, as JSON has to be.
    #[error("the body is not UTF-8 from byte {at} on")]
    NotUtf8 {
        /// Offset of the first byte that is not UTF-8.
        at: usize,
    },
    /// The body breaks the grammar of JSON.
    #[error("the body is not JSON: at byte {at} there should be {expected}")]
    NotJson {
        /// Offset of the first wrong byte.
        at: usize,
        /// Words for the client: "a value", "`,` or `}`".
        expected: &'static str,
    },
    /// Objects and arrays are nested too deep.
    #[error("the body is nested deeper than {most} levels, at byte {at}")]
    TooDeep {
        /// Offset of the first bracket that is too deep.
        at: usize,
        /// Most levels that the router accepts.
        most: usize,
    },
    /// The body is another kind of JSON value, such as an array.
    #[error("the body is JSON, but not an object")]
    NotAnObject,
    /// A member occurs twice, and the router cannot know which one an engine takes.
    #[error("the body has \"{key}\" twice, the second time at byte {at}")]
    Twice {
        /// Name of the member, without escapes.
        key: String,
        /// Offset of the second one.
        at: usize,
    },
    /// An array or object has more elements than the router keeps ranges of.
    #[error("the body has more than {most} {what}, from byte {at} on")]
    TooMany {
        /// "members" or "messages".
        what: &'static str,
        /// Offset of the first element that is too many.
        at: usize,
        /// Most elements that the router accepts.
        most: usize,
    },
    /// A name is longer than that of any member that engines know.
    #[error("the body has a member whose name is longer than {most} bytes, at byte {at}")]
    LongName {
        /// Offset at which the name begins.
        at: usize,
        /// Longest name that the router accepts.
        most: usize,
    },
}
