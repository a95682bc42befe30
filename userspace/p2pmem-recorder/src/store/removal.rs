// SPDX-License-Identifier: MIT OR Apache-2.0

//! Removing LUNs, streams, and recordings from several drives, so that a crash at any point can be repaired.
//!
//! First, the folder gets a suffix on every drive, and this is durable. Only then anything is removed. If a folder has
//! the suffix on one drive, the removal continues on all drives when the store is opened.

use std::path::{Path, PathBuf};

use super::error::{Context, Result};
use super::layout;
use super::system::System;

/// The names in a folder.
pub(crate) fn names(system: &impl System, folder: &Path) -> Result<Vec<String>> {
    let entries = system.list(folder).context("listing", folder)?;
    Ok(entries.into_iter().map(|entry| entry.name).collect())
}

/// Marks the folder `name` in all `parents` for removal. Parents that do not have the folder are fine. All marks are
/// durable afterwards, also those that were made before.
pub(crate) fn mark(system: &impl System, parents: &[PathBuf], name: &str) -> Result<()> {
    let marked = format!("{name}{}", layout::DELETED);
    for parent in parents {
        if names(system, parent)?.iter().any(|other| other == name) {
            let from = parent.join(name);
            system.rename(&from, &parent.join(&marked)).context("renaming", &from)?;
        }
    }
    for parent in parents {
        system.sync_folder(parent).context("syncing", parent)?;
    }
    Ok(())
}

/// Removes a folder and all that is in it. The caller syncs its parent.
pub(crate) fn remove_tree(system: &impl System, folder: &Path) -> Result<()> {
    for entry in system.list(folder).context("listing", folder)? {
        let path = folder.join(&entry.name);
        if entry.is_folder {
            remove_tree(system, &path)?;
        } else {
            system.remove_file(&path).context("removing", &path)?;
        }
    }
    system.remove_folder(folder).context("removing", folder)
}

/// Moves all segments below `folder` to the free segments, durably. Returns their numbers.
pub(crate) fn release_segments(system: &impl System, lun_folder: &Path, folder: &Path) -> Result<Vec<u64>> {
    let free = layout::free(lun_folder);
    let mut numbers = Vec::new();
    move_segments(system, folder, &free, &mut numbers)?;
    if !numbers.is_empty() {
        system.sync_folder(&free).context("syncing", &free)?;
    }
    Ok(numbers)
}

fn move_segments(system: &impl System, folder: &Path, free: &Path, numbers: &mut Vec<u64>) -> Result<()> {
    let mut moved = false;
    for entry in system.list(folder).context("listing", folder)? {
        let path = folder.join(&entry.name);
        if entry.is_folder {
            move_segments(system, &path, free, numbers)?;
        } else if let Ok(number) = entry.name.parse() {
            system
                .rename(&path, &free.join(&entry.name))
                .context("renaming", &path)?;
            numbers.push(number);
            moved = true;
        }
    }
    if moved {
        system.sync_folder(folder).context("syncing", folder)?;
    }
    Ok(())
}

/// Removes the marked folder `name` of a stream or a recording from one drive, and releases its segments. Returns their
/// numbers.
pub(crate) fn release_folder(system: &impl System, lun_folder: &Path, parent: &Path, name: &str) -> Result<Vec<u64>> {
    let folder = parent.join(name);
    let numbers = release_segments(system, lun_folder, &folder)?;
    remove_tree(system, &folder)?;
    system.sync_folder(parent).context("syncing", parent)?;
    Ok(numbers)
}

/// Removes all folders with a suffix from `parents`, whose marks are durable, and releases their segments. Returns the
/// numbers for each parent. A parent is given with the folder of the LUN on its drive.
pub(crate) fn release_marked(
    system: &impl System,
    parents: &[(PathBuf, PathBuf)],
    name: &str,
) -> Result<Vec<Vec<u64>>> {
    let mut released = Vec::new();
    for (lun_folder, parent) in parents {
        let mut numbers = Vec::new();
        for found in names(system, parent)? {
            if layout::split_suffix(&found) == (name, true) {
                numbers.extend(release_folder(system, lun_folder, parent, &found)?);
            }
        }
        released.push(numbers);
    }
    Ok(released)
}
