// SPDX-License-Identifier: MIT OR Apache-2.0

//! Completions that know this machine: its devices, providers, rules, and the columns of tables.
//!
//! A shell's script runs the program with the variable `COMPLETE` for each completion. clap_complete parses the words
//! and calls the functions here for the values of arguments.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Command, CommandFactory};
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use clap_complete::env::{self, CompleteEnv, EnvCompleter, Shells};
use p2pmem::admin::Admin;
use p2pmem::inventory::{DmaClient, Inventory};
use p2pmem::rules::{RuleState, Rules};
use p2pmem::{devices_in, short_size, CandidateDevice, Event, PathClass, PciDevice, Provider, Verdict};

use crate::cli::{Cli, Shell};
use crate::table::{self, Row};
use crate::{doctor, list, scan, topo, Environment};

/// The program's name.
const NAME: &str = "p2pmemctl";
/// The variable that requests completions.
const VARIABLE: &str = "COMPLETE";
/// The shells.
const SHELLS: Shells<'static> = Shells(&[&Bash, &env::Elvish, &env::Fish, &env::Zsh]);

/// Opens the machine whose devices are completed.
type Machine = Arc<dyn Fn() -> Environment + Send + Sync>;

/// Answers a shell that requests completions, and exits. Returns if no shell does.
pub fn complete() {
    let machine: Machine = Arc::new(|| {
        let path = std::env::var_os("P2PMEM_DEV_PATH").unwrap_or_else(|| p2pmem::DEFAULT_PATH.into());
        Environment::of_this_machine(PathBuf::from(path))
    });
    CompleteEnv::with_factory(|| command(&machine))
        .var(VARIABLE)
        .shells(SHELLS)
        .complete();
}

/// Writes the script that registers the completions with a shell.
///
/// # Errors
///
/// The output is not writable.
pub fn registration(shell: Shell, out: &mut dyn Write) -> io::Result<()> {
    let completer: &dyn EnvCompleter = match shell {
        Shell::Bash => &Bash,
        Shell::Elvish => &env::Elvish,
        Shell::Fish => &env::Fish,
        Shell::Zsh => &env::Zsh,
    };
    // The program of the search path answers: the script remains valid if the program moves.
    completer.write_registration(VARIABLE, NAME, NAME, NAME, out)?;
    if let Shell::Zsh = shell {
        // As a file of the function path, the script runs for the first completion, which it then has to answer.
        writeln!(
            out,
            "[[ ${{funcstack[1]-}} != _{NAME} ]] || _clap_dynamic_completer_{NAME}"
        )?;
    }
    Ok(())
}

/// Bash, which divides words at the colons of PCI addresses and at `=`.
///
/// clap_complete's own script expects undivided words. This script divides the line at blanks alone, and removes from the
/// answers the beginning of the word that bash keeps.
struct Bash;

/// The script. It calls the program as clap_complete's script does.
const BASH: &str = r#"_NAME() {
    local line=${COMP_LINE:0:COMP_POINT} words kept IFS
    IFS=$' \t' read -ra words <<<"$line"
    [[ $line != *[[:blank:]] ]] || words+=("")
    IFS=$'\013'
    COMPREPLY=($(_CLAP_IFS="$IFS" _CLAP_COMPLETE_INDEX="$((${#words[@]} - 1))" VAR=bash \
        "COMPLETER" -- "${words[@]}" 2>/dev/null)) || COMPREPLY=()
    kept=${words[-1]%"$2"}
    COMPREPLY=("${COMPREPLY[@]#"$kept"}")
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == */ ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -o bashdefault -o nosort -F _NAME BIN
"#;

impl EnvCompleter for Bash {
    fn name(&self) -> &'static str {
        "bash"
    }

    fn is(&self, name: &str) -> bool {
        name == self.name()
    }

    fn write_registration(
        &self,
        var: &str,
        name: &str,
        bin: &str,
        completer: &str,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        let script = BASH.replace("NAME", name).replace("BIN", bin);
        out.write_all(script.replace("COMPLETER", completer).replace("VAR", var).as_bytes())
    }

    fn write_complete(
        &self,
        command: &mut Command,
        words: Vec<OsString>,
        folder: Option<&Path>,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        env::Bash.write_complete(command, words, folder, out)
    }
}

/// The function that returns the candidates for the value of an argument.
type Candidates = fn(&Environment) -> Vec<CompletionCandidate>;

/// The command of the command line with these words, the argument, and its candidates.
const VALUES: &[(&[&str], &str, Candidates)] = &[
    (&["list"], "device", providers),
    (&["topo"], "device", providers_or_memory_devices),
    (&["topo"], "clients", clients),
    (&["publish"], "device", publishable),
    (&["publish"], "positional", publishable),
    (&["unpublish"], "device", published),
    (&["unpublish"], "positional", published),
    (&["rules", "add"], "device", memory_devices),
    (&["rules", "add"], "client", clients),
    (&["rules", "add"], "action", |_| {
        words(&["allow", "deny", "prefer", "avoid"])
    }),
    (&["rules", "add"], "max_class", |_| classes()),
    (&["rules", "add"], "reserve_for", |_| words(&["kernel", "group"])),
    (&["rules", "remove"], "names", rules),
    (&["rules", "test"], "near", clients),
    (&["rules", "test"], "device", providers),
    (&["rules", "test"], "prefer", providers),
    (&["rules", "test"], "max_class", |_| classes()),
    (&["alloc"], "near", clients),
    (&["alloc"], "device", providers),
    (&["alloc"], "prefer", providers),
    (&["alloc"], "max_class", |_| classes()),
    (&["run"], "near", clients),
    (&["explain"], "near", clients),
    (&["explain"], "device", providers),
    (&["explain"], "prefer", providers),
    (&["explain"], "max_class", |_| classes()),
    (&["stats"], "device", providers),
    (&["selftest"], "device", providers),
    (&["selftest"], "positional", providers),
    (&["selftest"], "nic", nics),
    (&["list"], OUTPUT, |_| columns::<Provider>()),
    (&["topo"], OUTPUT, |_| columns::<topo::PathRow>()),
    (&["rules", "list"], OUTPUT, |_| columns::<RuleState>()),
    (&["explain"], OUTPUT, |_| columns_of_both::<Verdict, CandidateDevice>()),
    (&["stats"], OUTPUT, |_| columns::<list::OneStats>()),
    (&["events"], OUTPUT, |_| columns::<Event>()),
    (&["scan"], OUTPUT, |_| columns_of_both::<scan::SourceRow, DmaClient>()),
    (&["doctor"], "pair", |machine| {
        let mut all = nics(machine);
        all.extend(memory_devices(machine));
        all
    }),
    (&["doctor"], OUTPUT, |_| columns::<doctor::Check>()),
];

/// The id of the option that selects columns. Its first value may have a plus sign; the case of its values does not matter.
const OUTPUT: &str = "output";

/// Returns the command line with the candidates for its values.
fn command(machine: &Machine) -> Command {
    let add = |command, (path, argument, candidates): &(&[&str], &'static str, Candidates)| {
        let (machine, argument, candidates) = (machine.clone(), *argument, *candidates);
        let values = ArgValueCompleter::new(move |begun: &OsStr| {
            let begun = begun.to_string_lossy();
            let (plus, begun) = match begun.strip_prefix('+') {
                Some(rest) if argument == OUTPUT => ("+", rest.to_ascii_uppercase()),
                None if argument == OUTPUT => ("", begun.to_ascii_uppercase()),
                _ => ("", begun.into_owned()),
            };
            let fits = |value: &CompletionCandidate| value.get_value().to_string_lossy().starts_with(&begun);
            let all = candidates(&machine()).into_iter().filter(fits);
            all.map(|value| value.add_prefix(plus)).collect()
        });
        with(command, path, argument, values)
    };
    VALUES.iter().fold(Cli::command(), add)
}

/// Adds candidates to an argument of the command with these words.
fn with(command: Command, path: &[&str], argument: &str, values: ArgValueCompleter) -> Command {
    match path.split_first() {
        None => command.mut_arg(argument, |argument| argument.add(values)),
        Some((first, rest)) => command.mut_subcommand(first, |command| with(command, rest, argument, values)),
    }
}

fn candidate(value: impl Into<OsString>, help: String) -> CompletionCandidate {
    CompletionCandidate::new(value).help(Some(help.into()))
}

fn words(all: &[&str]) -> Vec<CompletionCandidate> {
    all.iter().map(CompletionCandidate::new).collect()
}

fn classes() -> Vec<CompletionCandidate> {
    let reachable = PathClass::ALL.iter().filter(|class| **class != PathClass::Unreachable);
    let all = reachable.map(|class| candidate(class.short(), class.meaning().to_owned()));
    all.collect()
}

fn columns<R: Row>() -> Vec<CompletionCandidate> {
    let all = table::names::<R>().into_iter();
    all.map(|(name, about)| candidate(name, about.to_owned())).collect()
}

/// The columns of a command with two tables, of which an option selects one. A column of both tables is there once.
fn columns_of_both<First: Row, Second: Row>() -> Vec<CompletionCandidate> {
    let (mut all, other) = (columns::<First>(), columns::<Second>());
    let first = table::names::<First>();
    let is_new = |value: &CompletionCandidate| first.iter().all(|(name, _)| value.get_value() != *name);
    all.extend(other.into_iter().filter(is_new));
    all
}

/// The providers, if this user may list them.
fn providers(machine: &Environment) -> Vec<CompletionCandidate> {
    let all = (machine.open)()
        .and_then(|device| device.providers())
        .unwrap_or_default();
    let all = all.iter().map(|provider| {
        let (free, size) = (short_size(provider.free), short_size(provider.size));
        let help = format!("provider {}, {}, {free} of {size} free", provider.id, provider.kind);
        candidate(provider.addr.to_string(), help)
    });
    all.collect()
}

/// The providers; without the module, the devices with memory.
fn providers_or_memory_devices(machine: &Environment) -> Vec<CompletionCandidate> {
    let all = providers(machine);
    if all.is_empty() && !machine.has_module() {
        return memory_devices(machine);
    }
    all
}

/// The devices that can use memory: their names, or else their addresses.
fn clients(machine: &Environment) -> Vec<CompletionCandidate> {
    let devices = devices_in(&machine.path("sys")).unwrap_or_default();
    let all = devices
        .iter()
        .filter(|device| device.is_likely_client())
        .flat_map(names_of);
    all.collect()
}

fn names_of(device: &PciDevice) -> Vec<CompletionCandidate> {
    let driver = device.driver.as_deref().unwrap_or("no driver");
    let address = device.addr.to_string();
    if device.names.is_empty() {
        return vec![candidate(address, driver.to_owned())];
    }
    let names = device.names.iter();
    names
        .map(|name| candidate(name, format!("{address}, {driver}")))
        .collect()
}

/// The devices with memory.
fn memory_devices(machine: &Environment) -> Vec<CompletionCandidate> {
    devices_with_memory(machine, |_| true)
}

/// The devices with memory that are not providers.
fn publishable(machine: &Environment) -> Vec<CompletionCandidate> {
    devices_with_memory(machine, |device| device.driver.as_deref() != Some("p2pmem"))
}

fn devices_with_memory(machine: &Environment, wanted: fn(&PciDevice) -> bool) -> Vec<CompletionCandidate> {
    let inventory = Inventory::read_in(&machine.root, None);
    let devices = inventory.map(|inventory| inventory.memory_devices).unwrap_or_default();
    let all = devices.iter().filter(|found| wanted(&found.device)).map(|found| {
        let driver = found.device.driver.as_deref().unwrap_or("no driver");
        let size = found
            .memory_bar()
            .map(|bar| format!(", BAR {} of {}", bar.index, short_size(bar.size)));
        candidate(
            found.device.addr.to_string(),
            format!("{driver}{}", size.unwrap_or_default()),
        )
    });
    all.collect()
}

/// The published devices.
fn published(machine: &Environment) -> Vec<CompletionCandidate> {
    let admin = Admin::with_roots(machine.path("sys"), machine.path("sys/kernel/config"));
    let all = admin.published().unwrap_or_default().into_iter();
    all.map(|published| candidate(published.addr.to_string(), published.status))
        .collect()
}

fn rules(machine: &Environment) -> Vec<CompletionCandidate> {
    let all = Rules::with_root(machine.path("sys/kernel/config"))
        .list()
        .unwrap_or_default();
    all.into_iter()
        .map(|state| candidate(state.rule.name, state.status))
        .collect()
}

fn nics(machine: &Environment) -> Vec<CompletionCandidate> {
    let entries = std::fs::read_dir(machine.path("sys/class/infiniband"));
    let names = entries
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.file_name()));
    let mut all: Vec<_> = names.map(CompletionCandidate::new).collect();
    all.sort();
    all
}

#[cfg(test)]
mod tests;
