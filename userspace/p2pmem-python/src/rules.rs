// SPDX-License-Identifier: MIT OR Apache-2.0

//! The administrator's rules.

use std::path::PathBuf;

use p2pmem::rules::{Rule, Users};
use pyo3::prelude::*;
use pyo3::types::PyInt;

use crate::convert::{attribute, int, path_class, result, results, word, Int};
use crate::error::raise;

/// The rules of a machine; ``p2pmem.rules.Rules`` is the class for programs.
#[pyclass(module = "p2pmem._native", frozen)]
pub(crate) struct Rules {
    inner: p2pmem::rules::Rules,
}

fn users(value: Bound<'_, PyAny>) -> PyResult<Users> {
    if value.is_instance_of::<PyInt>() {
        let uid = value.extract::<Int<u32>>()?.0;
        return Users::new([uid..=uid]).map_err(raise);
    }
    value.extract::<String>()?.parse().map_err(raise)
}

/// A Rule of Python.
fn rule(rule: &Bound<'_, PyAny>) -> PyResult<Rule> {
    Ok(Rule {
        provider: attribute(rule, "provider", |v| v.extract())?,
        client: attribute(rule, "client", |v| v.extract())?,
        uid: attribute(rule, "uid", users)?,
        gid: attribute(rule, "gid", int)?,
        action: attribute(rule, "action", word)?,
        max_class: attribute(rule, "max_class", |v| path_class(&v))?,
        quota: attribute(rule, "quota", int)?,
        group_quota: attribute(rule, "group_quota", int)?,
        reserve: attribute(rule, "reserve", int)?,
        reserve_for: attribute(rule, "reserve_for", word)?,
        enabled: rule.getattr("enabled")?.extract()?,
        ..Rule::new(rule.getattr("name")?.extract::<String>()?)
    })
}

#[pymethods]
impl Rules {
    #[new]
    fn new(root: PathBuf) -> Self {
        Self {
            inner: p2pmem::rules::Rules::with_root(root),
        }
    }

    fn list<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        results(py, "rule_state", &py.detach(|| self.inner.list()).map_err(raise)?)
    }

    fn get<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        result(py, "rule_state", &py.detach(|| self.inner.get(name)).map_err(raise)?)
    }

    fn add<'py>(&self, py: Python<'py>, rule: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let rule = self::rule(rule)?;
        result(py, "rule_state", &py.detach(|| self.inner.add(&rule)).map_err(raise)?)
    }

    fn remove(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        py.detach(|| self.inner.remove(name)).map_err(raise)
    }

    fn replace<'py>(&self, py: Python<'py>, rule: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let rule = self::rule(rule)?;
        result(
            py,
            "rule_state",
            &py.detach(|| self.inner.replace(&rule)).map_err(raise)?,
        )
    }

    fn load<'py>(&self, py: Python<'py>, rules: Vec<Bound<'py, PyAny>>, only: bool) -> PyResult<Bound<'py, PyAny>> {
        let rules = rules.iter().map(rule).collect::<PyResult<Vec<_>>>()?;
        let load = || match only {
            true => self.inner.load_only(&rules),
            false => self.inner.load(&rules),
        };
        result(py, "loaded", &py.detach(load).map_err(raise)?)
    }
}
