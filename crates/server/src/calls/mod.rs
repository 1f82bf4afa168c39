//! What the calls of engines and tools do, a file for each group of them.

pub(crate) mod late;
pub(crate) mod load;
pub(crate) mod save_thread;
pub(crate) mod saver;
