//! GPUs: the only user of the CUDA driver.
//!
//! libcuda is opened at run time; a machine without it gives [`NoDriver`]. All calls go through the trait [`Driver`]. Tests
//! put the crate kvlane-fake-gpu behind it, so every layer above is tested on a machine without a GPU.
//!
//! ```text
//!   Together              the same bytes to several GPUs, a share over each link
//!     Loader (rails)      a load to one GPU, by its own link and those of idle GPUs
//!     Copier              any list of copies in one stream
//!       plan (pure)       each run: copy engine, batch call or copy kernel
//!   Imported, Chunks      memory of another process
//!   Gpu, Stream, Pinned   handles that are freed when dropped
//!     Driver              CUDA, or the fake
//! ```

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("kvlane runs on 64-bit Linux");

pub mod bench;
pub mod calibrate;
mod chunks;
pub mod copier;
mod cuda;
mod detect;
mod device;
pub mod driver;
mod error;
mod import;
mod kernel;
mod no_driver;
mod pinned;
pub mod plan;
mod rail_options;
mod rails;
mod relay;
mod ring;
pub mod split;
mod stream;
mod stream_word;
mod together;
mod words;

pub use bench::{measure_copy, measure_rails, measure_together};
pub use calibrate::Calibration;
pub use chunks::{ChunkRange, Chunks, ImportedChunks};
pub use copier::{Copier, CopierOptions, Enqueued};
pub use detect::{Drivers, detect, driver_named};
pub use device::{DeviceMemory, Gpu, uuid_text};
pub use driver::{
    Copy, CopyMethods, DeviceInfo, Driver, EventHandle, EventScope, IpcHandle, Priority, StreamHandle,
};
pub use error::{GpuError, code};
pub use import::{AddressMap, Export, Imported, MappedImport};
pub use kernel::{COPY, Grid, Kernel, Module, Residency, assert_is_compiled_from};
pub use no_driver::{DRIVER_VARIABLE, NoDriver};
pub use pinned::{CHUNK_BYTES, HostBuffer, Pinned};
pub use plan::{Direction, Thresholds};
pub use rail_options::{RailChoice, RailOptions, Staging};
pub use rails::{Loader, RailLoad, Rails};
pub use stream::{EngineStream, Event, Stream};
pub use stream_word::StreamWord;
pub use together::Together;
