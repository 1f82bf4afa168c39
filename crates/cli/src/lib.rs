//! The program `kvlane`: one file or folder for each subcommand.
#![forbid(unsafe_code)]

mod balance_table;
mod completions;
mod doctor;
mod errors;
mod index;
mod logging;
mod namespaces;
mod open_files;
mod otlp;
mod policy_arg;
mod python;
mod reach;
mod record;
mod reference;
mod replay;
mod route;
mod route_knowledge;
mod route_socket;
mod secret_file;
mod serve;
mod serve_options;
mod service;
mod size;
mod sizing;
mod span;
mod status;
mod terminal;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use kvlane_gpu::Drivers;

/// Keeps the KV cache of vLLM engines in a daemon outside the engine, so that it outlives them and is shared by all
/// engines of a host.
#[derive(Debug, Parser)]
#[command(name = "kvlane", version, arg_required_else_help = true, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the daemon in the foreground.
    Serve(Box<serve_options::ServeArgs>),
    /// Stand before engines as one OpenAI endpoint: each request goes to the engine that has most of its prompt and least to
    /// do, or to one that prefills and one that decodes.
    Route(Box<route::RouteCommand>),
    /// Tell the daemons of a cluster which of them has which blocks: a replica of its index.
    Index(Box<index::IndexArgs>),
    /// Show what a running daemon holds and who uses it.
    Status(status::StatusArgs),
    /// Say what of this machine kvlane can use, what stands in its way, and what to do about it.
    Doctor(doctor::DoctorArgs),
    /// Drop what a namespace holds.
    Drop(namespaces::DropArgs),
    /// Say how many bytes the KV cache of a model takes: a token, a block, and a pool of so many tokens.
    Size(sizing::SizeArgs),
    /// Record the requests of a running daemon, for `kvlane replay`: times, lengths, and a number for each block.
    Record(record::RecordArgs),
    /// Say what caches of several sizes and policies would have hit of a recorded trace: a table and a picture.
    Replay(replay::ReplayArgs),
    /// Benchmarks: `kvlane bench --help` lists them. Needs the Python package.
    #[command(disable_help_flag = true)]
    Bench(python::PythonArgs),
    /// A real vLLM, cold and warm, with the daemon and engines killed in between. Needs the Python package and vLLM.
    #[command(disable_help_flag = true)]
    Demo(python::PythonArgs),
    /// Print the script by which bash, zsh or fish completes kvlane's commands and flags.
    Completions(completions::CompletionsArgs),
    /// Write the reference pages of flags, metrics and calls.
    #[command(hide = true)]
    Reference(reference::ReferenceArgs),
}

/// Runs the command line, and returns the exit status. `drivers` are those of kvlane-gpu in users' programs; the program of
/// tests adds a fake.
pub fn main(drivers: Drivers) -> ExitCode {
    let result = match Cli::parse().command {
        Command::Serve(args) => return serve::run(*args, drivers),
        Command::Route(args) => return route::run(*args, Cli::command()),
        Command::Index(args) => return index::run(*args),
        Command::Status(args) => status::run(&args),
        Command::Doctor(args) => return doctor::run(&args, drivers),
        Command::Drop(args) => namespaces::run(&args),
        Command::Size(args) => sizing::run(&args),
        Command::Record(args) => record::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Bench(args) => python::run("kvlane.bench", &args),
        Command::Demo(args) => python::run("kvlane.demo", &args),
        Command::Completions(args) => completions::run(&args, Cli::command()),
        Command::Reference(args) => reference::run(&args, Cli::command()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => errors::print_error(&error),
    }
}
