//! Reference pages, made from the code: flags, metrics and calls, and the manual pages that the wheel installs.

use std::{ffi::OsString, fs, path::PathBuf};

use anyhow::{Result, bail};
use clap::{Args, Command};
use kvlane_door::Metric;
use kvlane_proto::PROTO_SOURCE;

#[derive(Debug, Args)]
pub(crate) struct ReferenceArgs {
    /// Folder of the pages
    folder: PathBuf,
    /// Write nothing, and fail when a page is not up to date
    #[arg(long)]
    check: bool,
}

const NOTE: &str = "<!-- Made by `kvlane reference docs/reference`; do not edit. -->\n\n";

/// Writes or checks the pages. `program` is the whole command line of kvlane.
pub(crate) fn run(args: &ReferenceArgs, program: Command) -> Result<()> {
    let manual = manual(program.clone())?;
    let pages = [("flags.md", flags(program)), ("metrics.md", metrics()), ("calls.md", calls())];
    let pages = pages.map(|(name, text)| (name.to_owned(), text)).into_iter();
    let mut wanted: Vec<OsString> = Vec::new();
    for (name, text) in pages.chain(manual) {
        wanted.extend(name.strip_prefix(MANUAL).map(OsString::from));
        let path = args.folder.join(name);
        if !args.check {
            fs::create_dir_all(args.folder.join(MANUAL))?;
            fs::write(&path, text)?;
        } else if fs::read_to_string(&path).unwrap_or_default() != text {
            bail!("{} is not up to date: run `kvlane reference {}`", path.display(), args.folder.display());
        }
    }
    for entry in fs::read_dir(args.folder.join(MANUAL))? {
        let entry = entry?;
        if wanted.contains(&entry.file_name()) {
            continue;
        } else if args.check {
            bail!(
                "{} is of no command: run `kvlane reference {}`",
                entry.path().display(),
                args.folder.display()
            );
        }
        fs::remove_file(entry.path())?;
    }
    Ok(())
}

/// Folder of the manual pages.
const MANUAL: &str = "man/";

/// A manual page for kvlane and for each of its commands, by file.
fn manual(mut program: Command) -> Result<Vec<(String, String)>> {
    program.build();
    let mut pages = Vec::new();
    add_manual(&mut pages, &program, "kvlane")?;
    Ok(pages)
}

fn add_manual(pages: &mut Vec<(String, String)>, command: &Command, name: &str) -> Result<()> {
    let visible =
        || command.get_subcommands().filter(|part| !part.is_hide_set() && part.get_name() != "help");
    let mut page = Vec::new();
    let of_command = clap_mangen::Man::new(command.clone()).title(name);
    of_command.source(concat!("kvlane ", env!("CARGO_PKG_VERSION"))).render(&mut page)?;
    pages.push((format!("{MANUAL}{name}.1"), String::from_utf8(page)?));
    for part in visible() {
        add_manual(pages, part, &format!("{name}-{}", part.get_name()))?;
    }
    Ok(())
}

fn flags(mut program: Command) -> String {
    let mut text = format!("{NOTE}# Flags\n");
    program.build();
    let visible = program
        .get_subcommands_mut()
        .filter(|command| !command.is_hide_set() && command.get_name() != "help");
    for command in visible {
        let name = command.get_name().to_owned();
        // Written in Python: its own --help tells.
        if name == "bench" || name == "demo" {
            let about = command.get_about().map(ToString::to_string).unwrap_or_default();
            text.push_str(&format!("\n## kvlane {name}\n\n{about}\n"));
            continue;
        }
        text.push_str(&help_of(command, &format!("## kvlane {name}")));
        for part in command.get_subcommands_mut().filter(|part| part.get_name() != "help") {
            let heading = format!("### kvlane {name} {}", part.get_name());
            text.push_str(&help_of(part, &heading));
        }
    }
    text
}

fn help_of(command: &Command, heading: &str) -> String {
    let mut command = command.clone().term_width(100).hide_possible_values(false);
    let help = command.render_long_help().to_string();
    // Values of the environment would make the page differ from machine to machine.
    let lines: Vec<String> = help.lines().map(|line| strip_environment(line).trim_end().to_owned()).collect();
    format!("\n{heading}\n\n```text\n{}\n```\n", lines.join("\n").trim_end())
}

/// `[env: NAME=value]` without the value.
fn strip_environment(line: &str) -> String {
    match line.find("[env: ").and_then(|at| line[at..].find('=').map(|equals| at + equals)) {
        Some(equals) => format!("{}=]", &line[..equals]),
        None => line.to_owned(),
    }
}

fn metrics() -> String {
    let mut text = format!(
        "{NOTE}# Metrics\n\n## The daemon\n\nServed at `/metrics` of `kvlane serve --http`.\n\n| name | kind | labels | what |\n|---|---|---|---|\n"
    );
    text.extend(kvlane_server::metrics().map(row));
    text.push_str(
        "\n## The router\n\nServed at `/metrics` of `kvlane route --admin`.\n\n\
         | name | kind | labels | what |\n|---|---|---|---|\n",
    );
    text.extend(kvlane_router::metrics::metrics().map(row));
    text.push_str(
        "\n## The index\n\nServed at `/metrics` of `kvlane index --http`.\n\n\
         | name | kind | labels | what |\n|---|---|---|---|\n",
    );
    text.extend(kvlane_server::index_metrics().map(row));
    text
}

fn row(Metric { name, kind, labels, help }: &Metric) -> String {
    format!("| `{name}` | {} | {labels} | {help} |\n", kind.name())
}

/// The messages of the wire with their comments, from the .proto file.
fn calls() -> String {
    let mut text = format!("{NOTE}# Calls\n\n");
    let mut comment: Vec<&str> = Vec::new();
    let mut depth = 0usize;
    for line in PROTO_SOURCE.lines().map(str::trim) {
        if let Some(words) = line.strip_prefix("//") {
            comment.push(words.trim());
            continue;
        }
        let told = paragraphs(&std::mem::take(&mut comment));
        let trailing = line.split_once("//").map_or("", |(_, words)| words.trim());
        let told = if told.is_empty() { trailing.to_owned() } else { told };
        if line.starts_with("syntax") {
            text.push_str(&format!("{told}\n"));
        } else if let Some(name) = line.strip_prefix("message ") {
            depth += 1;
            let told = if told.is_empty() { told } else { format!("{told}\n\n") };
            text.push_str(&format!("\n## {}\n\n{told}", name.trim_end_matches(['{', '}', ' '])));
            depth -= usize::from(line.ends_with('}'));
        } else if line.ends_with('{') {
            depth += 1;
        } else if line == "}" {
            depth = depth.saturating_sub(1);
        } else if depth > 0
            && let Some((field, _)) = line.split_once(';')
        {
            let (field, _) = field.split_once('=').unwrap_or((field, ""));
            let colon = if told.is_empty() { "" } else { ": " };
            text.push_str(&format!("- `{}`{colon}{told}\n", field.trim()));
        }
    }
    text
}

/// Comment lines as running text; an empty line parts paragraphs.
fn paragraphs(lines: &[&str]) -> String {
    lines.split(|line| line.is_empty()).map(|part| part.join(" ")).collect::<Vec<_>>().join("\n\n")
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn every_flag_metric_and_message_is_on_its_page() {
        let flags = flags(crate::Cli::command());
        assert!(
            flags.contains("--pool-size")
                && flags.contains("KVLANE_POOL_SIZE")
                && !flags.contains("## kvlane reference")
        );
        assert!(kvlane_server::metrics().all(|metric| metrics().contains(metric.name)));
        assert!(calls().contains("## Lookup\n") && calls().contains("- `uint64 max_tokens`: Upper bound"));
    }

    #[test]
    fn the_environment_of_this_machine_is_not_told() {
        assert_eq!(strip_environment("  [env: KVLANE_LOG=debug]"), "  [env: KVLANE_LOG=]");
        assert_eq!(strip_environment("plain = text"), "plain = text");
    }
}
