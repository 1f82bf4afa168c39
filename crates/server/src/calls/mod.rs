//! Carries out the calls of engines and tools, with a file for each group of them.
//!
//! A new call is a message in kvlane.proto, a variant and its row in `table.rs`, and a function in its group's file.

pub(crate) mod admin;
pub(crate) mod admit;
pub(crate) mod awaited_save;
pub(crate) mod context;
pub(crate) mod journal;
pub(crate) mod late;
pub(crate) mod load;
pub(crate) mod lookup;
pub(crate) mod outcome;
pub(crate) mod recording;
pub(crate) mod register;
pub(crate) mod save;
pub(crate) mod save_thread;
pub(crate) mod saver;
pub(crate) mod table;

use kvlane_proto::v1::request::Body as Ask;

use self::context::{Answered, Context};
use crate::refusal::Refusal;

/// Carries out a call that was admitted.
pub(crate) fn carry_out(context: &mut Context<'_>, ask: Ask) -> Result<Answered, Refusal> {
    let answer = match ask {
        Ask::Hello(_) => return Err(Refusal::invalid("this connection has said Hello already")),
        Ask::Lookup(lookup) => return lookup::look_up(context, lookup),
        Ask::Save(save) => return save::save(context, save),
        Ask::MapPool(map) => return register::map_pool(context, &map),
        Ask::Release(release) => lookup::release(context, &release),
        Ask::Heartbeat(heartbeat) => lookup::heartbeat(context, &heartbeat),
        Ask::ReadJournal(read) => journal::read(context, &read),
        Ask::RequestsEnded(ended) => recording::requests_ended(context, ended),
        Ask::ReadRecording(read) => recording::read(context, &read),
        Ask::Claim(claim) => save::claim(context, &claim),
        Ask::Commit(commit) => save::commit(context, &commit),
        Ask::CancelSaves(cancel) => save::cancel(context, &cancel),
        Ask::Load(load) => load::load(context, &load),
        Ask::OpenEngine(open) => register::open_engine(context, &open),
        Ask::ShareChunks(share) => register::share_chunks(context, &share),
        Ask::RegisterWorker(register) => register::register_worker(context, register),
        Ask::PoolMapped(_) => register::pool_mapped(context),
        Ask::GetStatus(_) => admin::status(context),
        Ask::Bye(_) => admin::bye(context),
        Ask::Settle(settle) => admin::settle(context, &settle),
        Ask::DropNamespaces(drop) => admin::drop_namespaces(context, &drop),
    };
    answer.map(Answered::from)
}
