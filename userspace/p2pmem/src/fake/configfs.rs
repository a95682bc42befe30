// SPDX-License-Identifier: MIT OR Apache-2.0

//! The rules of a fake configfs.

use std::fs;
use std::io;
use std::path::Path;

use crate::admin::Tree;
use crate::rules::{Rule, Rules};

/// A directory that behaves like configfs: a new rule has its attributes, and a rule in force has a setting. The errno of a
/// refusal is EINVAL.
struct FakeTree;

/// Attributes that are settings, one of which a rule in force must have.
const SETTINGS: [&str; 5] = ["action", "max_class", "quota", "group_quota", "reserve"];

impl Tree for FakeTree {
    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        let rule = path.parent().ok_or(io::ErrorKind::NotFound)?;
        let written = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let value = |attribute: &str| match attribute {
            _ if attribute == written => Ok(text.to_owned()),
            _ => fs::read_to_string(rule.join(attribute)).map(|value| value.trim_end().to_owned()),
        };
        if value("enable")? == "1" {
            let values = SETTINGS.map(value).into_iter().collect::<io::Result<Vec<_>>>()?;
            if values.iter().all(|value| value == "none") {
                fs::write(rule.join("status"), "refused: the rule says nothing\n")?;
                return Err(io::Error::from_raw_os_error(libc::EINVAL));
            }
            fs::write(rule.join("status"), "in force\n")?;
        }
        fs::OpenOptions::new().write(true).open(path)?;
        fs::write(path, text)
    }

    fn make_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)?;
        for (name, value) in Rule::new("").attributes() {
            fs::write(path.join(name), value)?;
        }
        for (name, value) in [("enable", "0\n"), ("status", "not in force\n"), ("usage", "")] {
            fs::write(path.join(name), value)?;
        }
        Ok(())
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir_all(path)
    }
}

/// Makes a configfs without rules in the folder `config`. Returns its rules, which can be changed as those of the module:
/// each has all attributes, and one without an effect is refused. Tests write the attribute `usage` themselves.
///
/// # Errors
///
/// Those of making the folder.
pub fn configfs_rules(config: &Path) -> io::Result<Rules> {
    fs::create_dir_all(config.join("p2pmem/rules"))?;
    Ok(Rules::with_tree(config, FakeTree))
}
