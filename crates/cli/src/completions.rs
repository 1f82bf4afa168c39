//! `kvlane completions`.

use std::io::Write;

use anyhow::Result;
use clap::{Args, Command, ValueEnum};
use clap_complete::{Shell, generate};

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Shells {
    Bash,
    Zsh,
    Fish,
}

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell. Bash: kvlane completions bash > ~/.local/share/bash-completion/completions/kvlane. Zsh: > _kvlane in a folder
    /// of $fpath. Fish: > ~/.config/fish/completions/kvlane.fish
    #[arg(value_name = "bash|zsh|fish")]
    shell: Shells,
}

/// Prints the script by which the shell completes commands and flags. `program` is the whole command line of kvlane.
pub(crate) fn run(args: &CompletionsArgs, mut program: Command) -> Result<()> {
    let shell = match args.shell {
        Shells::Bash => Shell::Bash,
        Shells::Zsh => Shell::Zsh,
        Shells::Fish => Shell::Fish,
    };
    let mut script = Vec::new();
    generate(shell, &mut program, "kvlane", &mut script);
    Ok(std::io::stdout().write_all(&script)?)
}
