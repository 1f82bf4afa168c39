//! `kvlane record` and `kvlane route record`: the requests of a running daemon or router, in a file for `kvlane replay`.

mod daemon;
mod recording;
mod router;
mod trace_writer;

pub(crate) use self::{
    daemon::{RecordArgs, run},
    router::{RouteRecordArgs, run as run_at_router},
};
