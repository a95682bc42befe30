// SPDX-License-Identifier: MIT OR Apache-2.0

//! `rules` and `apply`: the administrator's rules, and files with rules and devices to publish.

use std::path::{Path, PathBuf};

use anyhow::{bail, Context as _};
use p2pmem::admin::{self, Admin};
use p2pmem::rules::{Loaded, Rule, RuleState, Rules, Usage};
use p2pmem::{human_size, PciAddr};
use serde::Serialize;

use crate::alloc::{render_explanation, request};
use crate::cli::{ApplyArgs, RuleArgs, RulesCommand, RulesTestArgs};
use crate::file::{self, File};
use crate::table::{render, text};
use crate::{Context, Outcome};

/// Folder of the files that `apply` and `rules load` read by default.
const FOLDER: &str = "etc/p2pmem";

fn rules(context: &Context<'_>) -> Rules {
    Rules::with_root(context.environment.path("sys/kernel/config"))
}

pub(crate) fn run(context: &mut Context<'_>, command: &RulesCommand) -> anyhow::Result<Outcome> {
    match command {
        RulesCommand::List => list(context),
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

fn list(context: &mut Context<'_>) -> anyhow::Result<Outcome> {
    let all = rules(context).list()?;
    if context.json {
        context.print_json(&all)?;
    } else if all.is_empty() {
        writeln!(
            context.out,
            "There are no rules: all members of group p2pmem may allocate from every provider."
        )?;
    } else {
        let rows: Vec<_> = all.iter().map(row).collect();
        let columns = ["NAME", "MATCHES", "SETS", "COUNTS", "STATUS"].map(text);
        write!(context.out, "{}", render(&columns, &rows))?;
    }
    Ok(Outcome::Done)
}

fn row(state: &RuleState) -> Vec<String> {
    let rule = &state.rule;
    let size = |bytes: Option<u64>| bytes.map(human_size);
    let join = |parts: Vec<Option<String>>, none: &str| {
        let said: Vec<String> = parts.into_iter().flatten().collect();
        if said.is_empty() {
            none.to_owned()
        } else {
            said.join(", ")
        }
    };
    let matches = vec![
        rule.provider.as_ref().map(|d| format!("provider {d}")),
        rule.client.as_ref().map(|d| format!("client {d}")),
        rule.uid.as_ref().map(|users| format!("uid {users}")),
        rule.gid.map(|gid| format!("gid {gid}")),
    ];
    let sets = vec![
        rule.action.map(|a| a.to_string()),
        rule.max_class.map(|c| format!("max_class {c}")),
        size(rule.quota).map(|b| format!("quota {b}")),
        size(rule.group_quota).map(|b| format!("group_quota {b}")),
        size(rule.reserve).map(|b| {
            rule.reserve_for
                .map_or_else(|| format!("reserve {b}"), |who| format!("reserve {b} for {who}"))
        }),
    ];
    let counts = state.usage.iter().map(|usage| Some(describe(usage))).collect();
    vec![
        rule.name.clone(),
        join(matches, "everything"),
        join(sets, "nothing"),
        join(counts, "-"),
        state.status.clone(),
    ]
}

fn describe(usage: &Usage) -> String {
    match usage {
        Usage::User { uid, bytes } => format!("uid {uid} {}", human_size(*bytes)),
        Usage::Group { bytes } => format!("group {}", human_size(*bytes)),
        Usage::Reserve { provider, bytes } => format!("provider {provider} {}", human_size(*bytes)),
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
            provider: device(&self.provider)?.flatten(),
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
            let counts: Vec<String> = state.usage.iter().map(describe).collect();
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
    let rules = rules(context);
    let loaded = if only {
        rules.load_only(&wanted)?
    } else {
        rules.load(&wanted)?
    };
    if context.json {
        context.print_json(&loaded)?;
    } else {
        print_loaded(context, &loaded)?;
    }
    Ok(Outcome::Done)
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
    let states = rules(context).list()?;
    let text = file::render(states.iter().map(|state| &state.rule))?;
    match path {
        None => context.out.write_all(text.as_bytes())?,
        Some(path) => {
            // Rename the new file over the old one, so that readers see one of the two, complete.
            let mut new = path.as_os_str().to_owned();
            new.push(".part");
            let new = PathBuf::from(new);
            std::fs::write(&new, &text).with_context(|| new.display().to_string())?;
            std::fs::rename(&new, path).with_context(|| path.display().to_string())?;
            writeln!(context.out, "saved {} rules in {}", states.len(), path.display())?;
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
            context.print_json(&wanted)?;
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
        write!(context.out, "{}", render_explanation(&explanation))?;
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
        rules: rules(context).load_only(&wanted)?,
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
            eprintln!("p2pmemctl: {failed}");
        }
    }
    Ok(Outcome::of(applied.failed.is_empty()))
}
