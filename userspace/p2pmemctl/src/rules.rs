// SPDX-License-Identifier: MIT OR Apache-2.0

//! `rules` and `apply`: the administrator's rules, and files with rules and devices to publish.

use std::path::{Path, PathBuf};

use anyhow::{bail, Context as _};
use p2pmem::admin::{self, Admin};
use p2pmem::rules::{Loaded, Rule, RuleState, Rules, Usage};
use p2pmem::PciAddr;
use serde::Serialize;

use crate::alloc::{render_explanation, request};
use crate::cli::{ApplyArgs, RuleArgs, RulesCommand, RulesTestArgs};
use crate::file::{self, File};
use crate::table::{cell, message, number, on_request, optional, text, Cell, Column, Row, Sizes, Table, TableArgs};
use crate::table::{BAD, FAINT, GOOD, WARNING};
use crate::{slurm, Context, Outcome};

/// Folder of the files that `apply` and `rules load` read by default.
const FOLDER: &str = "etc/p2pmem";

fn rules(context: &Context<'_>) -> Rules {
    Rules::with_root(context.environment.path("sys/kernel/config"))
}

pub(crate) fn run(context: &mut Context<'_>, command: &RulesCommand) -> anyhow::Result<Outcome> {
    match command {
        RulesCommand::List { table } => list(context, table),
        RulesCommand::Add(args) => add(context, args),
        RulesCommand::Remove { names, force } => remove(context, names, *force),
        RulesCommand::Load { files, only } => {
            let files = read_all(context, files)?;
            load(context, &files, *only)
        }
        RulesCommand::Save { file } => save(context, file.as_deref()),
        RulesCommand::Test(args) => test(context, args),
    }
}

#[derive(Serialize)]
struct List<'a, T> {
    rules: &'a [T],
}

fn list(context: &mut Context<'_>, args: &TableArgs) -> anyhow::Result<Outcome> {
    let Some(table) = args.of::<RuleState>(context)? else {
        return Ok(Outcome::Done);
    };
    let all = rules(context).list()?;
    if context.json {
        context.print_json(&List { rules: &all })?;
    } else if all.is_empty() {
        context.hint("There are no rules: all members of group p2pmem may allocate from every provider.");
    } else {
        write!(context.out, "{}", table.render(&all))?;
        let remarks: String = all.iter().filter(|state| has_remark(state)).map(remark).collect();
        if !args.is_plain() && !remarks.is_empty() {
            write!(context.out, "\n{remarks}")?;
        }
    }
    Ok(Outcome::Done)
}

/// Returns whether the status of a rule says more than that the rule is in force.
fn has_remark(state: &RuleState) -> bool {
    state.status != "in force"
}

fn remark(state: &RuleState) -> String {
    format!("  {}: {}\n", state.rule.name, state.status)
}

impl Row for RuleState {
    const COLUMNS: &'static [Column<Self>] = &[
        text("NAME", "name of the rule", |state, _| cell(&state.rule.name)),
        text(
            "STATE",
            "on, off, or on* for a rule in force with a remark",
            |state, _| match (state.rule.enabled, has_remark(state)) {
                (false, _) => cell("off").style(FAINT),
                (true, true) => cell("on*").style(WARNING),
                (true, false) => cell("on").style(GOOD),
            },
        ),
        text("MATCHES", "what the rule applies to", |state, _| {
            cell(matches(&state.rule))
        }),
        text("SETS", "what the rule limits", |state, sizes| {
            cell(sets(&state.rule, sizes))
        }),
        text("COUNTS", "bytes that count under the rule", |state, sizes| {
            let counts: Vec<_> = state.usage.iter().map(|usage| count(usage, sizes)).collect();
            cell(counts.join(";"))
        }),
        on_request(text(
            "DEVICE",
            "device of the provider that the rule matches",
            |state, _| optional(state.rule.provider.as_ref()),
        )),
        on_request(text("CLIENT", "client that the rule matches", |state, _| {
            optional(state.rule.client.as_ref())
        })),
        on_request(text("UID", "users that the rule matches", |state, _| {
            optional(state.rule.uid.as_ref())
        })),
        on_request(text("GID", "group that the rule matches", |state, _| {
            optional(state.rule.gid)
        })),
        on_request(text("ACTION", "allow, deny, prefer, or avoid", |state, _| {
            optional(state.rule.action)
        })),
        on_request(text("MAX-CLASS", "farthest path class", |state, _| {
            optional(state.rule.max_class)
        })),
        on_request(number("QUOTA", "bytes that each user may hold", |state, sizes| {
            limit(state.rule.quota, sizes)
        })),
        on_request(number(
            "GROUP-QUOTA",
            "bytes that the users may hold together",
            |state, sizes| limit(state.rule.group_quota, sizes),
        )),
        on_request(number(
            "RESERVE",
            "bytes that are reserved in each provider",
            |state, sizes| limit(state.rule.reserve, sizes),
        )),
        on_request(text("RESERVE-FOR", "beneficiary of the reserve", |state, _| {
            optional(state.rule.reserve_for)
        })),
        on_request(message("STATUS", "the module's message about the rule", |state, _| {
            cell(&state.status)
        })),
    ];
}

fn limit(bytes: Option<u64>, sizes: Sizes) -> Cell {
    optional(bytes.map(|bytes| sizes.show(bytes)))
}

/// Joins the attributes that are set to one word.
fn attributes<const N: usize>(all: [(&str, Option<String>); N]) -> String {
    let set = all
        .into_iter()
        .filter_map(|(name, value)| Some(format!("{name}={}", value?)));
    set.collect::<Vec<_>>().join(";")
}

fn matches(rule: &Rule) -> String {
    let set = attributes([
        ("provider", rule.provider.clone()),
        ("client", rule.client.clone()),
        ("uid", rule.uid.as_ref().map(ToString::to_string)),
        ("gid", rule.gid.map(|gid| gid.to_string())),
    ]);
    if set.is_empty() {
        "any".into()
    } else {
        set
    }
}

fn sets(rule: &Rule, sizes: Sizes) -> String {
    let size = |bytes: Option<u64>| bytes.map(|bytes| sizes.show(bytes));
    attributes([
        ("action", rule.action.map(|action| action.to_string())),
        ("max_class", rule.max_class.map(|class| class.to_string())),
        ("quota", size(rule.quota)),
        ("group_quota", size(rule.group_quota)),
        ("reserve", size(rule.reserve)),
        ("reserve_for", rule.reserve_for.map(|who| who.to_string())),
    ])
}

/// Returns the bytes that count under a rule, as one word.
fn count(usage: &Usage, sizes: Sizes) -> String {
    match usage {
        Usage::User { uid, bytes } => format!("uid:{uid}={}", sizes.show(*bytes)),
        Usage::Group { bytes } => format!("group={}", sizes.show(*bytes)),
        Usage::Reserve { provider, bytes } => format!("provider:{provider}={}", sizes.show(*bytes)),
        _ => String::new(),
    }
}

fn add(context: &mut Context<'_>, args: &RuleArgs) -> anyhow::Result<Outcome> {
    let rule = args.rule(context)?;
    let state = rules(context).add(&rule)?;
    if context.json {
        context.print_json(&state)?;
    } else {
        writeln!(context.out, "{}: {}", rule.name, state.status)?;
    }
    Ok(Outcome::Done)
}

impl RuleArgs {
    fn rule(&self, context: &Context<'_>) -> anyhow::Result<Rule> {
        let device = |name: &Option<String>| name.as_deref().map(|name| file::device(context, name)).transpose();
        Ok(Rule {
            provider: device(&self.device)?.flatten(),
            client: device(&self.client)?.flatten(),
            uid: self.uid.as_deref().map(file::users).transpose()?,
            gid: self.gid.as_deref().map(file::group).transpose()?,
            action: self.action,
            max_class: self.max_class,
            quota: self.quota,
            group_quota: self.group_quota,
            reserve: self.reserve,
            reserve_for: self.reserve_for,
            enabled: !self.disabled,
            ..Rule::new(&self.name)
        })
    }
}

fn remove(context: &mut Context<'_>, names: &[String], force: bool) -> anyhow::Result<Outcome> {
    let rules = rules(context);
    for name in names {
        let state = rules.get(name)?;
        if !force && !state.usage.is_empty() {
            let counts: Vec<String> = state.usage.iter().map(|usage| count(usage, Sizes::Human)).collect();
            bail!(
                "rule {name} has charges: {}; --force removes it and moves the charges to the next matching rules",
                counts.join(", ")
            );
        }
        rules.remove(name)?;
    }
    if context.json {
        context.print_json(&serde_json::json!({ "removed": names }))?;
    } else {
        writeln!(context.out, "removed {}", names.join(", "))?;
    }
    Ok(Outcome::Done)
}

/// Reads the named files, or all files of the folder in the order of their names.
fn read_all(context: &Context<'_>, named: &[PathBuf]) -> anyhow::Result<Vec<(PathBuf, File)>> {
    let mut paths = named.to_vec();
    if paths.is_empty() {
        let folder = context.environment.path(FOLDER);
        let entries = std::fs::read_dir(&folder).with_context(|| folder.display().to_string())?;
        for entry in entries {
            let path = entry.with_context(|| folder.display().to_string())?.path();
            if path.extension().is_some_and(|e| e == "toml") {
                paths.push(path);
            }
        }
        paths.sort();
    }
    paths
        .into_iter()
        .map(|path| {
            let file = File::read(&path)?;
            Ok((path, file))
        })
        .collect()
}

/// Returns the rules of all files. Two rules of one name are an error that names both files.
fn all_rules(context: &Context<'_>, files: &[(PathBuf, File)]) -> anyhow::Result<Vec<Rule>> {
    let mut all: Vec<(Rule, &Path)> = Vec::new();
    for (path, file) in files {
        for entry in &file.rule {
            let rule = entry
                .resolve(context)
                .with_context(|| format!("{}: rule {}", path.display(), entry.name))?;
            if slurm::is_rule(&rule.name) {
                bail!(
                    "{}: rule {} has a name that `p2pmemctl slurm prolog` gives to its rules: choose another one",
                    path.display(),
                    rule.name
                );
            }
            if let Some((_, other)) = all.iter().find(|(other, _)| other.name == rule.name) {
                bail!(
                    "{}: rule {} is already in {}",
                    path.display(),
                    rule.name,
                    other.display()
                );
            }
            all.push((rule, path));
        }
    }
    Ok(all.into_iter().map(|(rule, _)| rule).collect())
}

fn load(context: &mut Context<'_>, files: &[(PathBuf, File)], only: bool) -> anyhow::Result<Outcome> {
    let wanted = all_rules(context, files)?;
    let loaded = if only {
        load_only(context, &wanted)?
    } else {
        rules(context).load(&wanted)?
    };
    if context.json {
        context.print_json(&loaded)?;
    } else {
        print_loaded(context, &loaded)?;
    }
    Ok(Outcome::Done)
}

/// Loads rules, and removes all others except those of running jobs of Slurm.
fn load_only(context: &Context<'_>, wanted: &[Rule]) -> anyhow::Result<Loaded> {
    let rules = rules(context);
    slurm::with_lock(context, || {
        let jobs = rules.list()?.into_iter().map(|state| state.rule);
        let jobs = jobs.filter(|rule| slurm::is_rule(&rule.name));
        let all: Vec<Rule> = wanted.iter().cloned().chain(jobs).collect();
        Ok(rules.load_only(&all)?)
    })
}

fn print_loaded(context: &mut Context<'_>, loaded: &Loaded) -> anyhow::Result<()> {
    let all = [
        ("added", &loaded.added),
        ("changed", &loaded.changed),
        ("removed", &loaded.removed),
        ("unchanged", &loaded.unchanged),
    ];
    for (what, names) in all.iter().filter(|(_, names)| !names.is_empty()) {
        writeln!(context.out, "{what}: {}", names.join(", "))?;
    }
    if all.iter().all(|(_, names)| names.is_empty()) {
        writeln!(context.out, "there are no rules in the files, and none in force")?;
    }
    Ok(())
}

fn save(context: &mut Context<'_>, path: Option<&Path>) -> anyhow::Result<Outcome> {
    let mut states = rules(context).list()?;
    // They end with their jobs.
    states.retain(|state| !slurm::is_rule(&state.rule.name));
    let text = file::render(states.iter().map(|state| &state.rule))?;
    match path {
        None if context.json => {
            let rules: Vec<_> = states.iter().map(|state| &state.rule).collect();
            context.print_json(&List { rules: &rules })?;
        }
        None => context.out.write_all(text.as_bytes())?,
        Some(path) => {
            // Rename the new file over the old one, so that readers see one of the two, complete.
            let mut new = path.as_os_str().to_owned();
            new.push(".part");
            let new = PathBuf::from(new);
            std::fs::write(&new, &text).with_context(|| new.display().to_string())?;
            std::fs::rename(&new, path).with_context(|| path.display().to_string())?;
            if context.json {
                context.print_json(&serde_json::json!({ "saved": states.len(), "file": path }))?;
            } else {
                writeln!(context.out, "saved {} rules in {}", states.len(), path.display())?;
            }
        }
    }
    Ok(Outcome::Done)
}

fn test(context: &mut Context<'_>, args: &RulesTestArgs) -> anyhow::Result<Outcome> {
    if !args.file.is_empty() {
        let files = read_all(context, &args.file)?;
        let wanted = all_rules(context, &files)?;
        for rule in &wanted {
            Rule::check_name(&rule.name)?;
        }
        if context.json && args.size.is_none() {
            context.print_json(&List { rules: &wanted })?;
        } else if !context.json {
            writeln!(context.out, "{} rules are well-formed", wanted.len())?;
        }
    }
    let Some(size) = args.size else {
        return Ok(Outcome::Done);
    };
    let device = context.open()?;
    let request = request(context, &device, size, &args.placement)?;
    let explanation = match (&args.uid, &args.gid) {
        (None, None) => device.explain(&request)?,
        (uid, gid) => {
            let user = uid.as_deref().map(file::account).transpose()?;
            let gid = gid.as_deref().map(file::group).transpose()?;
            let groups = user.as_ref().map_or_else(Vec::new, |user| user.groups.clone());
            let gid = gid.or(user.as_ref().map(|user| user.gid)).unwrap_or(0);
            device.explain_as(&request, user.map_or(0, |user| user.uid), gid, &groups)?
        }
    };
    if context.json {
        context.print_json(&explanation)?;
    } else {
        write!(context.out, "{}", render_explanation(&explanation, &Table::default()))?;
    }
    Ok(Outcome::of(explanation.errno.is_none()))
}

#[derive(Serialize)]
struct Applied {
    rules: Loaded,
    published: Vec<PciAddr>,
    unchanged: Vec<PciAddr>,
    failed: Vec<String>,
}

pub(crate) fn apply(context: &mut Context<'_>, args: &ApplyArgs) -> anyhow::Result<Outcome> {
    let files = read_all(context, &args.files)?;
    let wanted = all_rules(context, &files)?;
    // Load the rules first, so that they are in force when a provider appears.
    let mut applied = Applied {
        rules: load_only(context, &wanted)?,
        published: Vec::new(),
        unchanged: Vec::new(),
        failed: Vec::new(),
    };
    let root = context.environment;
    let admin = Admin::with_roots(root.path("sys"), root.path("sys/kernel/config"));
    let there = admin.published()?;
    for (path, entry) in files
        .iter()
        .flat_map(|(path, file)| file.publish.iter().map(move |entry| (path, entry)))
    {
        // A failure for one device does not prevent the publication of the others.
        let done = entry.resolve(context).and_then(|publish: admin::Publish| {
            if there.iter().any(|p| p.addr == publish.addr && p.enabled) {
                applied.unchanged.push(publish.addr);
            } else {
                admin.publish(&publish)?;
                applied.published.push(publish.addr);
            }
            Ok(())
        });
        if let Err(error) = done {
            applied
                .failed
                .push(format!("{}: {}: {error:#}", path.display(), entry.device));
        }
    }
    if context.json {
        context.print_json(&applied)?;
    } else {
        print_loaded(context, &applied.rules)?;
        for addr in &applied.published {
            writeln!(context.out, "published {addr}")?;
        }
        for addr in &applied.unchanged {
            writeln!(context.out, "{addr} was published already")?;
        }
        for failed in &applied.failed {
            context.hint(&format!("{BAD}p2pmemctl:{BAD:#} {failed}"));
        }
    }
    Ok(Outcome::of(applied.failed.is_empty()))
}
