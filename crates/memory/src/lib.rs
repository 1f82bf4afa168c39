//! Memory that several processes share, and the checks of who may touch it.
//!
//! - The pool: [`Arena`] in the daemon, [`PoolView`] in an engine, [`ExtentAllocator`] for its pages.
//! - Another process: [`RemoteProcess`] reads its memory, [`OwnProcess`] notices a fork of this one.
//! - Peers: [`PeerCredentials`] tell who is at the other end of a Unix socket, which also carries descriptors
//!   ([`send_with_fds`]).
//! - Files: [`RuntimeFolder`] is where the processes of one user find each other, [`SocketFile`] a socket in it.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("kvlane runs on 64-bit Linux");

mod acknowledged;
pub mod arena;
mod available;
pub mod descriptor;
pub mod extents;
mod heaps;
mod huge_memory;
mod hugepages;
pub mod mapping;
mod numa;
pub mod own_process;
pub mod peer;
pub mod pool_page;
mod private;
mod random;
pub mod remote;
pub mod runtime_folder;
pub mod socket_file;
mod streaming_copy;
mod users;
pub mod view;

pub use acknowledged::unacknowledged_bytes;
pub use arena::{Arena, ArenaError, ArenaOptions, HugePages, Numa};
pub use available::{Available, available_memory};
pub use descriptor::{DESCRIPTORS_MAX, recv_with_fds, send_with_fds};
pub use extents::ExtentAllocator;
pub use heaps::limit_heaps;
pub use huge_memory::HugeMemory;
pub use mapping::Mapping;
pub use own_process::{Forked, OwnProcess};
pub use peer::{
    PeerCredentials, allow_ptrace_by, check_same_user, peer_pidfd, pidfd_exited, pidfd_exited_within,
};
pub use pool_page::{PAGE_BYTES, PoolPage};
pub use private::PrivateMemory;
pub use random::random;
pub use remote::{ProbeError, RANGES_MAX, RemoteProcess};
pub use runtime_folder::{FolderFault, FolderRefused, RuntimeFolder};
pub use socket_file::{FileIdentity, SocketError, SocketFile};
pub use streaming_copy::copy_streaming;
pub use users::{own_user_is_unclear, user_number};
pub use view::{OutsidePool, PoolView};
