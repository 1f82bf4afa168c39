//! The socket at which a running router takes operators' calls.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use kvlane_memory::RuntimeFolder;
use kvlane_router::members::{Answer, AskError, Call, Listed, ask};

#[derive(Debug, Args)]
pub(crate) struct SocketArgs {
    /// The router's --socket [default: route.sock in the user's runtime directory]
    #[arg(long, env = "KVLANE_ROUTE_SOCKET", value_name = "PATH")]
    socket: Option<PathBuf>,
}

impl SocketArgs {
    /// Asks the running router, and gives the engines of its answer.
    pub(crate) fn ask(&self, call: &Call) -> Result<Vec<Listed>> {
        Ok(self.ask_whole(call)?.nodes)
    }

    /// Asks the running router.
    pub(crate) fn ask_whole(&self, call: &Call) -> Result<Answer, AskError> {
        ask(&self.socket.clone().unwrap_or_else(default_socket), call)
    }
}

/// Where the router listens unless `--socket` says otherwise.
pub(crate) fn default_socket() -> PathBuf {
    RuntimeFolder::of_this_user().path().join("route.sock")
}
